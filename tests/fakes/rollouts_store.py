"""A policy's rollouts, and groups and episodes to read, in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from clawloop.core.contracts.episodes import EpisodeView, GroupView, RolloutsPlan, RolloutsState, RolloutsView
from clawloop.core.errors import NotFound, RecordUnusable, SignalFailed
from clawloop.core.ids import EpisodeId, RolloutGroupId


@dataclass
class FakeRolloutsStore:
    """Satisfies `clawloop.operations.rollouts.RolloutsStore` and `EnvironmentWorkers`, for the policy `default`.

    Attributes:
        available: Temporal answers.
        asking: environments whose worker asks for work; busy: groups that a worker works at.
        open: groups.
    """

    plan: RolloutsPlan | None = None
    paused: str | None = None
    available: bool = True
    asking: set[str] = field(default_factory=lambda: {"tool-call"})
    busy: set[RolloutGroupId] = field(default_factory=set)
    open: list[RolloutGroupId] = field(default_factory=list)

    async def start(self, policy: str, plan: RolloutsPlan) -> RolloutsView:
        _require(policy)
        self.plan, self.paused = plan, None
        return await self.status(policy)

    async def pause(self, policy: str, reason: str) -> RolloutsView:
        _require(policy)
        if self.plan is None:
            raise NotFound("never started", code="rollouts_not_found", field="policy")
        self.paused = reason
        return await self.status(policy)

    async def status(self, policy: str) -> RolloutsView:
        _require(policy)
        state = RolloutsState.RUNNING if self.paused is None else RolloutsState.PAUSED
        if self.plan is None:
            state = RolloutsState.NEVER_STARTED
        return RolloutsView(policy, state, self.paused or "", self.plan, 0, 0, 0, None)

    async def oldest_open(self, environment: str, limit: int) -> list[RolloutGroupId]:
        return self.open[:limit]

    async def asks_for_work(self, environment: str) -> bool:
        self._require_temporal()
        return environment in self.asking

    async def has_work(self, groups: Sequence[RolloutGroupId]) -> bool:
        self._require_temporal()
        return not self.busy.isdisjoint(groups)

    def _require_temporal(self) -> None:
        if not self.available:
            raise SignalFailed("the fake is set to be unavailable")


@dataclass
class FakeEpisodeKeys:
    """Keys of episodes.

    Attributes:
        running: keys of episodes that no agent has played.
    """

    running: dict[EpisodeId, str] = field(default_factory=dict)

    async def key_of(self, episode: EpisodeId) -> str:
        if episode not in self.running:
            raise RecordUnusable(f"episode {episode} does not run, or its key ends soon")
        return self.running[episode]


@dataclass
class FakeEpisodeReader:
    """Satisfies `clawloop.operations.rollouts.EpisodeReader`; both lists are newest first."""

    all_groups: list[GroupView] = field(default_factory=list)
    all_episodes: list[EpisodeView] = field(default_factory=list)

    async def groups(self, *, policy: str | None, after: RolloutGroupId | None, limit: int) -> list[GroupView]:
        _require(policy)
        found = [g for g in self.all_groups if policy in (None, g.policy) and (after is None or g.id < after)]
        return found[:limit]

    async def episodes(
        self, *, policy: str | None, group: RolloutGroupId | None, after: EpisodeId | None, limit: int
    ) -> list[EpisodeView]:
        _require(policy)
        chosen = [e for e in self.all_episodes if policy in (None, e.policy) and group in (None, e.group)]
        return [episode for episode in chosen if after is None or episode.id < after][:limit]

    async def episode(self, episode: EpisodeId) -> EpisodeView | None:
        return next((found for found in self.all_episodes if found.id == episode), None)

    async def find_episode(self, reference: str) -> EpisodeId:
        found = [episode.id for episode in self.all_episodes if str(episode.id).startswith(reference)]
        if reference == "last":
            found = [episode.id for episode in self.all_episodes[:1]]
        if not found:
            raise NotFound(f"there is no episode {reference!r}", code="episode_not_found", field="episode")
        return found[0]

    async def find_group(self, reference: str) -> RolloutGroupId:
        found = [group.id for group in self.all_groups if str(group.id).startswith(reference)]
        if not found:
            raise NotFound(f"there is no group {reference!r}", code="group_not_found", field="group")
        return found[0]


def _require(policy: str | None) -> None:
    if policy not in (None, "default"):
        raise NotFound(f"there is no policy {policy!r}.", code="policy_not_found", field="policy")
