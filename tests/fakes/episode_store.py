"""Rollout groups and episodes in memory, without turns; passes the same contract suite as the store in PostgreSQL."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from clawloop.core.contracts.episodes import (
    Ending,
    EpisodeBegun,
    EpisodeEnd,
    EpisodeScore,
    EpisodeState,
    GroupBegun,
    GroupResult,
    GroupState,
    NewGroup,
)
from clawloop.core.errors import EpisodeUnusable, RecordUnusable, StoreUnavailable
from clawloop.core.ids import EpisodeId, RolloutGroupId, new_episode_id
from clawloop.core.recipes.recipe import Signal
from clawloop.core.samples.rollouts import Member, settle


@dataclass
class FakeEpisode:
    begun: EpisodeBegun
    state: EpisodeState = EpisodeState.RUNNING
    ending: Ending | None = None
    reward: float | None = None
    reason: str = ""
    artifact_sha256: str | None = None


@dataclass
class FakeGroup:
    new: NewGroup
    episodes: dict[tuple[int, int], FakeEpisode] = field(default_factory=dict)  # by place and attempt
    result: GroupResult | None = None


class FakeEpisodeStore:
    """Satisfies `activities.episodes.EpisodeStore`.

    Attributes:
        judged: votes on turns are part of the reward.
        room: the next end makes room in the rollouts of this policy.
        failures: so many ends fail first, as without PostgreSQL.
        refusals: so many settlements fail first for good, and with them their group's run.
    """

    def __init__(self) -> None:
        self.judged = False
        self.room: str | None = None
        self.failures = 0
        self.refusals = 0
        self.all: dict[RolloutGroupId, FakeGroup] = {}
        self.by_id: dict[EpisodeId, FakeEpisode] = {}

    async def make_group(self, group: NewGroup) -> None:
        if group.size < 2 or group.policy != "default":
            raise RecordUnusable(f"size {group.size}, policy {group.policy!r}")
        self.all.setdefault(group.id, FakeGroup(group))

    async def begin_group(self, group: RolloutGroupId, lifetime: timedelta) -> GroupBegun:
        if (found := self.all.get(group)) is None:
            raise RecordUnusable(f"there is no rollout group {group}")
        new = found.new
        state = self.state_of(group)
        places = range(new.size) if state is GroupState.OPEN else ()
        begun = [await self.begin_episode(group, place, 1, lifetime) for place in places]
        return GroupBegun(new.policy, new.environment, new.task, new.size, state, self.judged, begun)

    async def begin_episode(self, group: RolloutGroupId, place: int, attempt: int, lifetime: timedelta) -> EpisodeBegun:
        if (found := self.all.get(group)) is None:
            raise RecordUnusable(f"there is no rollout group {group}")
        for (at, number), episode in found.episodes.items():
            if at == place and (
                number == attempt or episode.state not in (EpisodeState.RUNNING, EpisodeState.ABANDONED)
            ):
                return replace(episode.begun, state=episode.state, artifact_sha256=episode.artifact_sha256)
        if found.result is not None or place >= found.new.size:
            raise RecordUnusable(f"rollout group {group} is settled, or smaller")
        for (at, _), episode in found.episodes.items():
            if at == place:
                _abandon(episode, f"attempt {attempt} took its place")
        begun = EpisodeBegun(new_episode_id(), group, place, attempt)
        self.by_id[begun.id] = found.episodes[place, attempt] = FakeEpisode(begun)
        return begun

    async def key_of(self, episode: EpisodeId) -> str:
        found = self.by_id.get(episode)
        if found is None or found.state is not EpisodeState.RUNNING:
            raise RecordUnusable(f"episode {episode} does not run")
        return f"ce_{episode.hex}.fake"

    async def end_episode(self, end: EpisodeEnd) -> str | None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("the fake is set to fail")
        episode = self.by_id[end.id]
        if end.ending is Ending.INFRASTRUCTURE:
            _abandon(episode, end.reason)
        elif episode.state is EpisodeState.RUNNING:
            episode.state, episode.ending, episode.reason = EpisodeState.ENDED, end.ending, end.reason
        episode.artifact_sha256 = episode.artifact_sha256 or end.artifact_sha256
        if end.score is not None:
            await self.score_episode(end.score)
        room, self.room = self.room, None
        return room

    async def score_episode(self, score: EpisodeScore) -> None:
        reward = score.reward
        if reward is not None and not 0 <= reward <= 1:
            raise EpisodeUnusable(f"reward {reward:g} is not between 0 and 1")
        found = self.by_id[score.episode]
        if found.state is EpisodeState.ENDED:
            found.state = EpisodeState.UNSCORED if reward is None else EpisodeState.SCORED
            found.reward, found.reason = reward, score.reason

    async def settle(self, group: RolloutGroupId) -> tuple[GroupResult, str | None]:
        if (found := self.all.get(group)) is None:
            raise RecordUnusable(f"there is no rollout group {group}")
        if self.refusals:
            self.refusals -= 1
            raise RecordUnusable("the fake is set to refuse")
        if found.result is None:
            for episode in found.episodes.values():
                _abandon(episode, "its group was settled without it")
            last = {place: found.episodes[place, attempt] for place, attempt in sorted(found.episodes)}
            settlement = settle([_member(last.get(place)) for place in range(found.new.size)], Signal())
            found.result = GroupResult(
                group, settlement.state, settlement.scored, settlement.mean_reward, 0, settlement.reason
            )
        return found.result, None

    def state_of(self, group: RolloutGroupId) -> GroupState:
        result = self.all[group].result
        return GroupState.OPEN if result is None else result.state


def _abandon(episode: FakeEpisode, reason: str) -> None:
    if episode.state in (EpisodeState.RUNNING, EpisodeState.ENDED):
        episode.state, episode.reason = EpisodeState.ABANDONED, reason


def _member(episode: FakeEpisode | None) -> Member:
    if episode is None:
        return Member(None, EpisodeState.ABANDONED, None, "it never began", ())
    return Member(episode.begun.id, episode.state, episode.reward, episode.reason, ())
