"""The ledger of rollout groups, for their workflows. Each activity is one idempotent call of the store."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from temporalio import activity

from activities.episodes.messages import BeginEpisode, ScoreEpisode
from activities.episodes.ports import EpisodeStore, RolloutStore
from activities.training.notifier import TrainingNotifier
from clawloop.contracts.episodes import EpisodeBegun, EpisodeEnd, GroupBegun, GroupResult, NextGroups
from clawloop.contracts.notices import Notifier, RolloutsChanged
from clawloop.episodes.keys import KEY_LIFETIME
from clawloop.episodes.messages import REASON_LIMIT
from clawloop.errors import SignalFailed
from clawloop.heartbeat import heartbeating
from clawloop.ids import RolloutGroupId

log = logging.getLogger(__name__)


class EpisodeLedgerActivities:
    """On the queue `ledger`, and where the workflows run: short, PostgreSQL only."""

    def __init__(
        self, store: EpisodeStore, rollouts: RolloutStore, training: TrainingNotifier, notifier: Notifier
    ) -> None:
        self._store = store
        self._rollouts = rollouts
        self._training = training
        self._notifier = notifier

    @property
    def where_workflows_run(self) -> list[Callable[..., Awaitable[object]]]:
        """What `workflows.ledger_call` calls: for the worker of the workflows and for that of the queue."""
        return [self.next_groups, self.begin_group, self.begin_episode, self.end_episode, self.score_episode]

    @activity.defn
    async def begin_group(self, group: RolloutGroupId) -> GroupBegun:
        """What the group's episodes have to do, and the first attempt at each place, with its key."""
        async with heartbeating():
            return await self._store.begin_group(group, KEY_LIFETIME)

    @activity.defn
    async def begin_episode(self, request: BeginEpisode) -> EpisodeBegun:
        """The episode of an attempt, with its key."""
        async with heartbeating():
            return await self._store.begin_episode(request.group, request.place, request.attempt, KEY_LIFETIME)

    @activity.defn
    async def end_episode(self, end: EpisodeEnd) -> None:
        """Record how an episode ended; its key is revoked."""
        async with heartbeating():
            await self._notify_room(await self._store.end_episode(end))

    @activity.defn
    async def score_episode(self, request: ScoreEpisode) -> None:
        """Record an episode's reward, and its end if it came with that."""
        async with heartbeating():
            verdict = request.reward, request.reason[:REASON_LIMIT]
            if request.end is None:
                await self._store.score_episode(request.episode, *verdict)
            else:
                await self._notify_room(await self._store.end_scored_episode(request.end, *verdict))

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
            return await self._rollouts.next_groups(policy)

    async def _notify_room(self, policy: str | None) -> None:
        if policy is None:
            return
        try:
            await self._notifier.notify(RolloutsChanged(policy))
        except SignalFailed as error:
            log.warning("signal failed, rollouts look again soon", extra={"policy": policy, "why": str(error)})
