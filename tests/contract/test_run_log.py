"""A log of steps for TensorBoard: what TensorBoard reads of it is what the ledger holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from activities.training.train_step import TrainingActivities, TrainStep
from clawloop.core.contracts.training import StepState
from clawloop.training.run_log import TensorBoardLog, scalars_of
from tests.contract.learning import POLICY, Learning
from tests.fakes.trainer import FakeTrainer


def read(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Tag → (step, value, time), as TensorBoard itself reads the run."""
    found = EventAccumulator(str(folder / POLICY)).Reload()
    return {
        tag: [(event.step, event.value, event.wall_time) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


async def test_tensorboard_reads_the_stored_figures_of_each_step_once(learning: Learning, tmp_path: Path) -> None:
    activities = TrainingActivities(learning.steps, FakeTrainer(), run_log=TensorBoardLog(tmp_path).write)
    for n in (1, 2):
        await learning.add_samples(4)
        assert (await learning.steps.claim(POLICY, n)).state is StepState.CLAIMED
        asked = TrainStep(policy=POLICY, n=n)
        await activities.train_step(asked)
        await activities.train_step(asked)  # retried: it is a candidate already
        await learning.gate.accept(POLICY, n)
        await activities.train_step(asked)  # or committed
    expected: dict[str, list[tuple[int, object, object]]] = {}
    for version in (await learning.operators.versions(POLICY))[1:]:
        assert version.metrics is not None
        for tag, value in scalars_of(version.metrics):
            at = version.created_at.timestamp()
            expected.setdefault(tag, []).append((version.n, pytest.approx(value), pytest.approx(at, abs=1e-3)))
    assert read(tmp_path) == expected  # of each figure one point a step
    assert {"loss", "kl", "tokens", "seconds", "parts/policy_gradient"} <= expected.keys()
    assert {len(points) for points in expected.values()} == {2}


async def test_a_folder_that_cannot_be_written_to_costs_no_step(
    learning: Learning, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    taken = tmp_path / "taken"
    taken.touch()
    activities = TrainingActivities(learning.steps, FakeTrainer(), run_log=TensorBoardLog(taken).write)
    await learning.add_samples(4)
    await learning.steps.claim(POLICY, 1)
    done = await activities.train_step(TrainStep(policy=POLICY, n=1))
    assert done.state is StepState.CANDIDATE
    assert "step not in the run log" in caplog.messages
