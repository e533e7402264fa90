"""The ledger of steps, for the training workflow. Each activity is one idempotent call of the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from temporalio import activity

from activities.training.messages import REASON_LIMIT, AbandonStep, ClaimBatch, QuarantineStep
from activities.training.ports import StepStore
from clawloop.contracts.training import Claim, StepState, TrainingView
from clawloop.crash_points import CrashPoint, crash_point
from clawloop.heartbeat import heartbeating


class StepActivities:
    """On the queue `ledger`, and two of them where the workflows run: short, PostgreSQL only."""

    def __init__(self, store: StepStore) -> None:
        self._store = store

    @property
    def where_workflows_run(self) -> list[Callable[..., Awaitable[object]]]:
        """What `workflows.ledger_call` calls: for the worker of the workflows and for that of the queue."""
        return [self.read_training_status, self.claim_batch]

    @activity.defn
    async def read_training_status(self, policy: str) -> TrainingView:
        """The policy's training state now."""
        async with heartbeating():
            view = await self._store.status(policy)
        return replace(view, reason=view.reason[:REASON_LIMIT])

    @activity.defn
    async def claim_batch(self, request: ClaimBatch) -> Claim:
        """The batch of a step; the same batch on each call."""
        async with heartbeating():
            claim = await self._store.claim(request.policy, request.n)
        if claim.state is StepState.CLAIMED:
            crash_point(CrashPoint.CLAIMED)
        return replace(claim, reason=claim.reason[:REASON_LIMIT])

    @activity.defn
    async def quarantine_step(self, request: QuarantineStep) -> None:
        """Quarantine a step's samples and pause training."""
        async with heartbeating():
            await self._store.quarantine(request.policy, request.n, request.reason)

    @activity.defn
    async def abandon_step(self, request: AbandonStep) -> None:
        """Give up a claimed step."""
        async with heartbeating():
            await self._store.abandon(request.policy, request.n, request.reason)
