"""One trainer for many policies, whose ledgers are scripted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from activities.serving.publishing import Published, PublishVersion
from activities.training.gate import DecideVersion, VersionDecided
from activities.training.steps import ClaimBatch
from activities.training.train_step import StepDone, TrainStep
from clawloop.core.contracts.training import Claim, TrainingView
from tests.workflows.conftest import end_all
from tests.workflows.learning import Learner, ScriptedLearning, orchestrating
from workflows import names


@dataclass(frozen=True, slots=True)
class Turn:
    """A step that the trainer took.

    Args:
        claimed_at, began_at: by this process's clock.
    """

    policy: str
    n: int
    claimed_at: float
    began_at: float


class SharedTrainer:
    """The activities of many policies; each call goes to the policy's own script.

    Attributes:
        turns: in the order in which the trainer took them.
        step_seconds: how long each step takes.
    """

    def __init__(self, step_seconds: float = 0.0) -> None:
        self.pool = f"pool{uuid4().hex[:8]}"
        self.turns: list[Turn] = []
        self.step_seconds = step_seconds
        self._scripts: dict[str, ScriptedLearning] = {}
        self._claimed: dict[tuple[str, int], float] = {}

    def add(self) -> ScriptedLearning:
        """A further policy."""
        script = ScriptedLearning()
        script.pool = self.pool
        self._scripts[script.policy] = script
        return script

    @activity.defn(name="read_training_status")
    async def look(self, policy: str) -> TrainingView:
        return await self._scripts[policy].look(policy)

    @activity.defn(name="claim_batch")
    async def claim(self, ask: ClaimBatch) -> Claim:
        claim = await self._scripts[ask.policy].claim(ask)
        self._claimed.setdefault((ask.policy, ask.n), time.monotonic())
        return claim

    @activity.defn(name="train_step")
    async def train(self, ask: TrainStep) -> StepDone:
        self.turns.append(Turn(ask.policy, ask.n, self._claimed[ask.policy, ask.n], time.monotonic()))
        await asyncio.sleep(self.step_seconds)
        return await self._scripts[ask.policy].train(ask)

    @activity.defn(name="decide_version")
    async def decide(self, ask: DecideVersion) -> VersionDecided:
        return await self._scripts[ask.policy].decide(ask)

    @activity.defn(name="publish_version")
    async def publish(self, ask: PublishVersion) -> Published:
        return await self._scripts[ask.policy].publish(ask)


@asynccontextmanager
async def shared_trainer(client: Client, step_seconds: float = 0.0) -> AsyncIterator[SharedTrainer]:
    """Workers of many policies, one step at a time; what still runs at the end is ended."""
    shared = SharedTrainer(step_seconds)
    queue = names.trainer_queue(shared.pool)
    async with (
        orchestrating(client, [shared.look, shared.claim, shared.decide], [shared.publish]),
        Worker(client, task_queue=queue, activities=[shared.train], max_concurrent_activities=1),
    ):
        try:
            yield shared
        finally:
            await end_all(client)


async def all_queued(learners: Sequence[Learner], seconds: float = 60) -> None:
    """Wait until each of these policies has a step that waits for the trainer."""
    async with asyncio.timeout(seconds):
        for learner in learners:
            while not await _has_step(learner):
                await asyncio.sleep(0.02)


async def _has_step(learner: Learner) -> bool:
    described = await learner.handle.describe()
    waiting = described.raw_description.pending_activities
    return any(one.activity_type.name == "train_step" for one in waiting)
