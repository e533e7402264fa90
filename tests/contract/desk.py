"""The activity that trains steps, with stores in memory and in PostgreSQL, and a trainer that computes nothing."""

from __future__ import annotations

import pytest

from activities.training.train_step import TrainingActivities, TrainStep
from clawloop.core.contracts.training import StepBatch, StepState
from clawloop.core.ids import SampleId
from tests.contract.learning import POLICY, Learning
from tests.fakes.trainer import FakeTrainer

ASK = TrainStep(policy=POLICY, n=1)


class Desk:
    def __init__(self, learning: Learning) -> None:
        self.learning = learning
        self.trainer = FakeTrainer()
        self.activities = TrainingActivities(learning.steps, self.trainer)

    async def claim(self, n: int = 1) -> tuple[list[SampleId], StepBatch]:
        samples = await self.learning.add_samples(4)
        assert (await self.learning.steps.claim(POLICY, n)).state is StepState.CLAIMED
        return samples, await self.learning.steps.batch(POLICY, n)


@pytest.fixture
def desk(learning: Learning) -> Desk:
    return Desk(learning)
