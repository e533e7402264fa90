"""Rollouts, their groups and episodes as operators start, pause and read them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from clawloop.core.contracts.answers import EpisodePage, GroupPage
from clawloop.core.contracts.episodes import EpisodeView, GroupView, RolloutsPlan, RolloutsView
from clawloop.core.contracts.notices import Notifier, RolloutsChanged
from clawloop.core.errors import NotFound, SignalFailed
from clawloop.core.ids import EpisodeId, RolloutGroupId
from clawloop.operations.applied import Applied, notify_best_effort
from clawloop.operations.training import check_reason

# Rollouts -------------------------------------------------------------------------------------------------------------
# Operators' changes to a policy's rollouts: PostgreSQL decides; the workflow is then notified, best effort.

# Workers that are named environments and nothing else; any other name is that of a folder or a package.
EXAMPLES = {
    "tool-call": "“What is 58 plus 97?”, with a Python tool",
    "terminal": "“Rename books.txt to memo.txt.”, with a shell",
    "swe": "“minus in units.py is wrong”, in a small repository",
    "browser": "a form or a list on a small page, in Chromium",
    "reasoning-gym": "puzzles of that package, with a Python tool",
}
"""A task of each environment that comes with Clawloop, in a few words."""
# Episodes begin in the order of their groups: if a worker is busy, it is with one of the oldest.
_GROUPS_LOOKED_AT = 32


class RolloutsStore(Protocol):
    """Operators' view of a policy's rollouts, and their changes to them.

    Every method raises NotFound if there is no such policy.
    """

    async def start(self, policy: str, plan: RolloutsPlan) -> RolloutsView:
        """Start rollouts, or continue them by this plan."""

    async def pause(self, policy: str, reason: str) -> RolloutsView:
        """Start no further group.

        Raises:
            NotFound: they were never started.
        """

    async def status(self, policy: str) -> RolloutsView: ...

    async def oldest_open(self, environment: str, limit: int) -> list[RolloutGroupId]:
        """Open groups of the environment, of all policies, oldest first."""


class EnvironmentWorkers(Protocol):
    """View of environments' workers. Every call raises SignalFailed when Temporal does not answer."""

    async def asks_for_work(self, environment: str) -> bool:
        """True if a worker asked for the environment's episodes in the last minutes. A busy worker does not ask."""

    async def has_work(self, groups: Sequence[RolloutGroupId]) -> bool:
        """True if a worker runs an agent, or a verifier, of one of these groups."""


class RolloutOperations:
    """Every operation raises what the `RolloutsStore` raises."""

    def __init__(self, store: RolloutsStore, notifier: Notifier, workers: EnvironmentWorkers) -> None:
        self._store = store
        self._notifier = notifier
        self._workers = workers

    async def start(self, policy: str, plan: RolloutsPlan) -> Applied[RolloutsView]:
        """Start rollouts, or continue them by this plan."""
        return await self._notified(await self._store.start(policy, plan))

    async def pause(self, policy: str, reason: str) -> Applied[RolloutsView]:
        """Start no group until they are started again; those in flight are finished.

        Raises:
            ValueRejected: the reason is empty or too long.
        """
        return await self._notified(await self._store.pause(policy, check_reason(reason)))

    async def status(self, policy: str) -> RolloutsView:
        return await self._with_workers(await self._store.status(policy))

    async def _notified(self, view: RolloutsView) -> Applied[RolloutsView]:
        applied = await notify_best_effort(view, self._notifier.notify(RolloutsChanged(view.policy)))
        if applied.signal_error is not None:
            return applied  # Temporal does not answer, and is not waited for twice
        return Applied(await self._with_workers(view))

    async def _with_workers(self, view: RolloutsView) -> RolloutsView:
        if view.plan is None or await self._is_served(view.plan.environment):
            return view
        return replace(view, no_worker=no_worker(view.plan.environment))

    async def _is_served(self, environment: str) -> bool:
        """True also where Temporal does not answer: that is said elsewhere."""
        try:
            if await self._workers.asks_for_work(environment):
                return True
            return await self._workers.has_work(await self._store.oldest_open(environment, _GROUPS_LOOKED_AT))
        except SignalFailed:
            return True


def no_worker(environment: str) -> str:
    """One line: that no worker serves the environment, and what starts one."""
    name = shlex.quote(environment)
    if environment in EXAMPLES:
        how = f"`clawloop worker environment --environment {name}` starts one"
    else:
        how = (
            f"`clawloop worker environment --tasks {name}` starts one for a folder of tasks,"
            f" `clawloop-environment --verifiers {name}` for a package of verifiers"
        )
    return f"no worker serves the environment {environment!r}, and its episodes wait: {how}"


# Episodes -------------------------------------------------------------------------------------------------------------
# Rollout groups and episodes as people list and read them.


class EpisodeReader(Protocol):
    """Rollout groups and episodes for people. Every method raises StoreUnavailable, and NotFound for a policy that
    does not exist."""

    async def groups(self, *, policy: str | None, after: RolloutGroupId | None, limit: int) -> list[GroupView]:
        """Groups, newest first; `after` is the last of the previous page."""

    async def episodes(
        self, *, policy: str | None, group: RolloutGroupId | None, after: EpisodeId | None, limit: int
    ) -> list[EpisodeView]:
        """Episodes, newest first; `after` is the last of the previous page."""

    async def episode(self, episode: EpisodeId) -> EpisodeView | None:
        """The episode; None if there is none of this id."""

    async def find_episode(self, reference: str) -> EpisodeId:
        """The episode with this id or beginning of an id; `last` is the newest. Raises NotFound and AmbiguousId."""

    async def find_group(self, reference: str) -> RolloutGroupId:
        """The rollout group with this id or beginning of an id. Raises NotFound and AmbiguousId."""


async def group_page(
    reader: EpisodeReader, *, policy: str | None, after: RolloutGroupId | None = None, limit: int
) -> GroupPage:
    # One more than the page holds shows whether there is another page.
    found = await reader.groups(policy=policy, after=after, limit=limit + 1)
    page = found[:limit]
    return GroupPage(groups=page, next=page[-1].id if len(found) > limit else None)


async def episode_page(
    reader: EpisodeReader,
    *,
    policy: str | None,
    group: RolloutGroupId | None,
    after: EpisodeId | None = None,
    limit: int,
) -> EpisodePage:
    found = await reader.episodes(policy=policy, group=group, after=after, limit=limit + 1)
    page = found[:limit]
    return EpisodePage(episodes=page, next=page[-1].id if len(found) > limit else None)


async def found_episode(reader: EpisodeReader, reference: str) -> EpisodeView:
    """
    Raises:
        NotFound, AmbiguousId, StoreUnavailable
    """
    episode = await reader.episode(await reader.find_episode(reference))
    if episode is None:  # nothing deletes episodes: an id was found a moment ago
        raise NotFound(f"There is no episode {reference!r}.", code="episode_not_found", field="episode")
    return episode
