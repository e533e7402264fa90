"""The ledger of rollout groups, for their workflows and for the sweep.

Each activity is one idempotent call of the store.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Protocol

from temporalio import activity

from activities.notify import TrainingNotifier
from clawloop.core.contracts.episodes import (
    EpisodeBegun,
    EpisodeEnd,
    EpisodeScore,
    GroupBegun,
    GroupResult,
    NewGroup,
    NextGroups,
)
from clawloop.core.contracts.notices import Message, Notifier, RolloutsChanged
from clawloop.core.episodes.keys import KEY_LIFETIME
from clawloop.core.errors import SignalFailed
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import RolloutGroupId

log = logging.getLogger(__name__)


class EpisodeStore(Protocol):
    """The ledger of rollout groups. Every call is idempotent, and raises StoreUnavailable when PostgreSQL does not
    answer."""

    async def make_group(self, group: NewGroup) -> None:
        """Insert an open group.

        Raises:
            RecordUnusable: there is no such policy, or its size is below 2.
        """

    async def begin_group(self, group: RolloutGroupId, lifetime: timedelta) -> GroupBegun:
        """The group's task, and for each place what `begin_episode` says of its first attempt, in one transaction.

        Raises:
            RecordUnusable: there is no such group, or its policy was retired.
        """

    async def begin_episode(self, group: RolloutGroupId, place: int, attempt: int, lifetime: timedelta) -> EpisodeBegun:
        """The episode of this attempt, with a key that expires after `lifetime`; or, as it is, the episode at the place
        that was begun for this attempt before, or that has ended.

        Attempts at the place that still run are abandoned and their keys revoked.

        Raises:
            RecordUnusable: there is no such group or place, or the group is settled.
        """

    async def end_episode(self, end: EpisodeEnd) -> str | None:
        """Record how a running episode ended, with the score that came with it, and revoke its key, in one transaction;
        nothing if it has ended already.

        After `infrastructure` it is abandoned: its turns are never trained. What its agent left is noted in any case.

        Returns:
            Its policy, if this made room for another group of its rollouts.

        Raises:
            EpisodeUnusable: as `score_episode`.
        """

    async def score_episode(self, score: EpisodeScore) -> None:
        """Record the reward of an ended episode; nothing if it has one, runs, or was abandoned.

        Raises:
            EpisodeUnusable: the reward is not between 0 and 1.
        """

    async def settle(self, group: RolloutGroupId) -> tuple[GroupResult, str | None]:
        """Settle or drop the group, once; episodes that have not ended are abandoned.

        Returns:
            The result, and the policy if it has a batch since this call.

        Raises:
            RecordUnusable: there is no such group.
        """


class BeginEpisode(Message):
    group: RolloutGroupId
    place: int
    attempt: int


class EpisodeLedgerActivities:
    """Activities that record episodes in PostgreSQL; on the queue `ledger`, and where the workflows run. Short.

    Args:
        next_groups: inserts the groups that the policy's rollouts have room for: none while they or training are
            paused, or enough groups wait to be trained. After too many groups without a sample it pauses them, with the
            last reason. Raises StoreUnavailable.
    """

    def __init__(
        self,
        store: EpisodeStore,
        next_groups: Callable[[str], Awaitable[NextGroups]],
        training: TrainingNotifier,
        notifier: Notifier,
    ) -> None:
        self._store = store
        self._next_groups = next_groups
        self._training = training
        self._notifier = notifier

    @property
    def where_workflows_run(self) -> list[Callable[..., Awaitable[object]]]:
        """Activities that `call_ledger` of the workflows calls: for the workers of the workflows and of the queue."""
        return [self.next_groups, self.begin_group, self.begin_episode, self.end_episode, self.score_episode]

    @activity.defn
    async def begin_group(self, group: RolloutGroupId) -> GroupBegun:
        """Return the task of the group's episodes, and the first attempt at each place, with its key."""
        async with heartbeating():
            return await self._store.begin_group(group, KEY_LIFETIME)

    @activity.defn
    async def begin_episode(self, request: BeginEpisode) -> EpisodeBegun:
        """The episode of an attempt, with its key."""
        async with heartbeating():
            return await self._store.begin_episode(request.group, request.place, request.attempt, KEY_LIFETIME)

    @activity.defn
    async def end_episode(self, end: EpisodeEnd) -> None:
        """Record how an episode ended, and its reward if it has one by then; its key is revoked."""
        async with heartbeating():
            await self._notify_room(await self._store.end_episode(end))

    @activity.defn
    async def score_episode(self, score: EpisodeScore) -> None:
        """Record the reward of an ended episode."""
        async with heartbeating():
            await self._store.score_episode(score)

    @activity.defn
    async def settle_group(self, group: RolloutGroupId) -> GroupResult:
        """Make the group's samples; notify training of a full batch."""
        async with heartbeating():
            result, policy = await self._store.settle(group)
            await self._training.notify(policy)
            return result

    @activity.defn
    async def next_groups(self, policy: str) -> NextGroups:
        """The groups that a policy's rollouts start now."""
        async with heartbeating():
            return await self._next_groups(policy)

    async def _notify_room(self, policy: str | None) -> None:
        if policy is None:
            return
        try:
            await self._notifier.notify(RolloutsChanged(policy))
        except SignalFailed as error:
            log.warning("signal failed, rollouts look again soon", extra={"policy": policy, "why": str(error)})


class EpisodeUpkeep:
    """The sweep's part for episodes: late turns, and rollouts whose workflow was not notified or was lost.

    Each call of the store raises StoreUnavailable when PostgreSQL does not answer.

    Args:
        end_late_turns: ends turns that were stored after their rollout group was settled; gives their number.
        running: the policies whose rollouts run, or have open groups.
        reward_votes: makes samples of a learning judge's votes whose rollout group is settled; gives their number.
    """

    def __init__(
        self,
        end_late_turns: Callable[[], Awaitable[int]],
        running: Callable[[], Awaitable[list[str]]],
        notifier: Notifier,
        reward_votes: Callable[[], Awaitable[int]],
    ) -> None:
        self._end_late_turns = end_late_turns
        self._running = running
        self._notifier = notifier
        self._reward_votes = reward_votes

    async def sweep(self) -> int:
        """End late turns, notify the workflows of running rollouts and reward judges that learn; the number of late
        turns."""
        late = await self._end_late_turns()
        for policy in await self._running():
            await self._notifier.notify(RolloutsChanged(policy))
        await self._reward_votes()
        return late
