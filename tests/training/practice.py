"""A toy practises in one process by its demo's recipe: real training steps, replies sampled here.

Also a program, which prints each measurement:
`python -m tests.training.practice --environment terminal --seed 1 --steps 30 --lag 1 --out FILE`
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from clawloop.app.demo.toy_model import Attempt, ToyModel
from clawloop.app.demo.toys import GROUP_SIZE, Toy, toy_of
from clawloop.core.algorithms.rewards import episode_advantages
from clawloop.core.contracts.training import BatchSample, StepBatch, VersionRef
from clawloop.core.ids import new_episode_id, new_sample_id
from clawloop.training.adapters.merge import merge
from clawloop.training.ranks import ignore_status
from clawloop.training.setup import TrainerSetup
from clawloop.training.step_runner import StepRunner
from tests.training.steps import completed, never

# Each seed practises on training tasks of its own.
_TASKS_OF_A_SEED = 100_000


@dataclass(frozen=True, slots=True)
class Point:
    """
    Args:
        success: share of one attempt at each held-out task that is right.
        groups: so far; constant: those of them whose attempts all had the same reward.
    """

    step: int
    success: float
    groups: int
    constant: int
    seconds: float


def practise(
    toy: Toy,
    folder: Path,
    *,
    seed: int,
    steps: int,
    measure_at: Sequence[int],
    held_out: Sequence[str],
    lag: int = 0,
    report: Callable[[Point], None] = lambda point: None,
) -> list[Point]:
    """
    Args:
        folder: for adapters and merged models; must exist.
        seed: decides the sampled replies and which training tasks are taken.
        measure_at: steps; 0 is the model before.
        lag: steps by which the version that practises is behind the newest one, as it is with real engines.
    """
    torch.manual_seed(seed)
    began = time.monotonic()
    groups = _Groups(toy, seed * _TASKS_OF_A_SEED)
    trainer = StepRunner(TrainerSetup(model=toy.folder, adapters=folder / "adapters", device="cpu", threads=1))
    newest, parent = ToyModel(toy), None
    served: deque[tuple[ToyModel, int]] = deque([(newest, 0)], maxlen=lag + 1)
    points: list[Point] = []

    def measure(step: int) -> None:
        if step in measure_at:
            success = newest.success(held_out)
            points.append(Point(step, success, groups.made, groups.constant, round(time.monotonic() - began, 1)))
            report(points[-1])

    measure(0)
    for n in range(1, steps + 1):
        parent = completed(
            trainer.train(_step(toy, n, parent, groups.sample(*served[0])), ignore_status, never)
        ).version
        merged = folder / f"merged-{n}"
        merge(toy.folder, folder / "adapters" / parent.path, merged)
        newest = ToyModel(toy, merged)
        shutil.rmtree(merged)
        served.append((newest, n))
        measure(n)
    return points


class _Groups:
    """Samples of rollout groups, each of the next training task; one with equal rewards is replaced by another."""

    def __init__(self, toy: Toy, next_task: int) -> None:
        self._toy = toy
        self._next_task = next_task
        self.made = self.constant = 0

    def sample(self, model: ToyModel, version: int) -> list[BatchSample]:
        samples: list[BatchSample] = []
        missing = self._toy.batch_groups
        while missing:
            tasks = [f"train-{self._next_task + at}" for at in range(missing)]
            self._next_task += missing
            attempts = model.attempts([task for task in tasks for _ in range(GROUP_SIZE)])
            for at in range(0, len(attempts), GROUP_SIZE):
                of_group = _samples(attempts[at : at + GROUP_SIZE], version)
                samples += of_group
                self.made += 1
                self.constant += not of_group
                missing -= bool(of_group)
        return samples


def _samples(group: Sequence[Attempt], version: int) -> list[BatchSample]:
    advantages = episode_advantages([attempt.reward for attempt in group])
    assert advantages is not None
    samples = []
    for attempt, advantage in zip(group, advantages, strict=True):
        episode = new_episode_id()
        samples += [
            BatchSample(
                sample_id=new_sample_id(),
                prompt_ids=turn.prompt_ids,
                response_ids=turn.response_ids,
                logprobs=turn.logprobs,
                temperature=1.0,
                version=version,
                reward=advantage,
                episode=episode,
            )
            for turn in attempt.turns
            if advantage is not None
        ]
    return samples


def _step(toy: Toy, n: int, parent: VersionRef | None, samples: Sequence[BatchSample]) -> StepBatch:
    recipe = toy.recipe()
    return StepBatch(
        policy="default", base_model=toy.folder.name, n=n, parent=parent, epoch=0, recipe=recipe, samples=samples
    )


def _show(point: Point) -> None:
    sys.stdout.write(f"{point}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=120)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    toy = toy_of(given.environment)
    with tempfile.TemporaryDirectory() as folder:
        points = practise(
            toy,
            Path(folder),
            seed=given.seed,
            steps=given.steps,
            measure_at=range(0, given.steps + 1, given.every),
            held_out=[f"test-{number}" for number in range(given.tasks)],
            lag=given.lag,
            report=_show,
        )
    if given.out is not None:
        rows = [{name: getattr(point, name) for name in Point.__slots__} for point in points]
        run = {
            "environment": toy.environment,
            "seed": given.seed,
            "lag": given.lag,
            "tasks": given.tasks,
            "points": rows,
        }
        given.out.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
