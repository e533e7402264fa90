"""The ledger of steps, as the training workflow asks it.

Knows nothing about how a step is computed. Each is one call of the store; asked twice, it answers the same.
"""

from __future__ import annotations

from dataclasses import replace

from temporalio import activity

from activities.training.messages import REASON_LIMIT, AbandonStep, ClaimBatch, QuarantineStep
from activities.training.ports import StepStore
from clawloop.contracts.training import Claim, TrainingView


class StepActivities:
    """On the queue `ledger`: short, PostgreSQL only."""

    def __init__(self, store: StepStore) -> None:
        self._store = store

    @activity.defn(name="look_at_training")
    async def look_at_training(self, policy: str) -> TrainingView:
        """How learning of this policy stands now."""
        view = await self._store.status(policy)
        return replace(view, reason=view.reason[:REASON_LIMIT])

    @activity.defn(name="claim_batch")
    async def claim_batch(self, ask: ClaimBatch) -> Claim:
        """The batch of a step, once."""
        claim = await self._store.claim(ask.policy, ask.n)
        return replace(claim, reason=claim.reason[:REASON_LIMIT])

    @activity.defn(name="quarantine_step")
    async def quarantine_step(self, ask: QuarantineStep) -> None:
        """Set a step's samples aside and pause training."""
        await self._store.quarantine(ask.policy, ask.n, ask.reason)

    @activity.defn(name="abandon_step")
    async def abandon_step(self, ask: AbandonStep) -> None:
        """Give a claimed step up."""
        await self._store.abandon(ask.policy, ask.n, ask.reason)
