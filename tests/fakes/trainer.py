"""A trainer that computes nothing: on one machine the same batch always makes the same version."""

from __future__ import annotations

import hashlib

from clawloop.core.contracts.training import (
    BatchSample,
    SampleMetrics,
    StatusCallback,
    StepBatch,
    StepFigures,
    TrainedStep,
    VersionRef,
)
from clawloop.core.errors import ClawloopError
from clawloop.core.ids import SampleId


class FakeTrainer:
    """Satisfies `activities.training.train_step.Trainer`.

    Args:
        machine: another one, with another number of cores or another GPU, makes another adapter of the same batch.

    Attributes:
        taken: the steps it was asked for.
        fails: raised, one for each step, before it computes any.
        bug: raised once, as `fails`, where no error of ours is.
        dropped: samples it leaves out, with reasons.
    """

    def __init__(self, machine: str = "") -> None:
        self._machine = machine
        self.taken: list[StepBatch] = []
        self.fails: list[ClawloopError] = []
        self.bug: BaseException | None = None
        self.dropped: dict[SampleId, str] = {}

    async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
        report(f"step {step.n}: loading the model")
        self.taken.append(step)
        if self.bug is not None:
            bug, self.bug = self.bug, None
            raise bug
        if self.fails:
            raise self.fails.pop(0)
        parent = 0 if step.parent is None else step.parent.n
        told = repr((step.policy, step.n, parent, [sample.sample_id for sample in step.samples], self._machine))
        digest = hashlib.sha256(told.encode()).hexdigest()
        path = f"{step.policy}/v{step.n}-{digest[:12]}"
        report(f"step {step.n}: training, micro-batch 1 of 1")
        dropped = {
            sample.sample_id: self.dropped[sample.sample_id]
            for sample in step.samples
            if sample.sample_id in self.dropped
        }
        figures = StepFigures(
            loss=0.5,
            parts={"policy_gradient": 0.5},
            grad_norm=1.0,
            ratio=1.0,
            kl=0.01,
            tokens=sum(len(sample.response_ids) for sample in step.samples),
            samples={
                sample.sample_id: metrics_of(sample) for sample in step.samples if sample.sample_id not in dropped
            },
            dropped=dropped,
            micro_batches=1,
            fillers=0,
            distance_seconds=0.25,
        )
        return TrainedStep(VersionRef(step.policy, step.n, parent, path, digest), figures, seconds=0.1)


def metrics_of(sample: BatchSample) -> SampleMetrics:
    """Figures of a sample on policy, without a KL part."""
    return SampleMetrics(
        tokens=len(sample.response_ids),
        ratio_mean=1.0,
        ratio_max=1.0,
        mean_abs_log_ratio=0.0,
        clip_share=0.0,
        kl=None,
        entropy=None,
    )
