"""The tool-call model learns from groups of episodes by the demo's recipe: real steps, replies sampled here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clawloop.algorithms.episodes import episode_advantages
from clawloop.contracts.training import BatchSample, StepBatch, VersionRef
from clawloop.demo.tool_calls.attempts import Attempt, ToolCallModel
from clawloop.demo.tool_calls.location import model_path
from clawloop.demo.tool_calls.recipe import GROUP_SIZE, tool_call_recipe
from clawloop.environments.task import Split
from clawloop.environments.tool_call.environment import question
from clawloop.ids import new_episode_id, new_sample_id
from clawloop.training.adapters.merge import merge
from clawloop.training.progress import ignore_status
from clawloop.training.setup import TrainerSetup
from clawloop.training.step_runner import StepRunner
from tests.training.steps import completed, never

STEPS = 16
HELD_OUT = [question(Split.TEST, number) for number in range(100)]


def sample_groups(model: ToolCallModel, first: int, version: int) -> list[BatchSample]:
    """Samples of as many groups as a step takes, of the training tasks from `first` on."""
    samples: list[BatchSample] = []
    groups = tool_call_recipe().train.batch_groups
    asked = [question(Split.TRAIN, first + number) for number in range(groups)]
    attempts = model.attempts([each for each in asked for _ in range(GROUP_SIZE)])
    for at in range(0, len(attempts), GROUP_SIZE):
        group = attempts[at : at + GROUP_SIZE]
        advantages = episode_advantages([attempt.reward for attempt in group])
        assert advantages is not None
        for attempt, advantage in zip(group, advantages, strict=True):
            samples += samples_of(attempt, advantage, version)
    return samples


def samples_of(attempt: Attempt, advantage: float | None, version: int) -> list[BatchSample]:
    if advantage is None:
        return []
    episode = new_episode_id()
    return [
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
    ]


@pytest.mark.slow
def test_sixteen_steps_teach_it_to_call_the_tool_rightly(tmp_path: Path) -> None:
    torch.manual_seed(1)
    base = model_path()
    model = ToolCallModel(base)
    parent: VersionRef | None = None
    before = model.success(HELD_OUT)
    trainer = StepRunner(TrainerSetup(model=base, adapters=tmp_path / "adapters", device="cpu", threads=1))
    for n in range(1, STEPS + 1):
        version = 0 if parent is None else parent.n
        samples = sample_groups(model, 1000 * n, version)
        step = StepBatch(
            policy="default",
            base_model=base.name,
            n=n,
            parent=parent,
            epoch=0,
            recipe=tool_call_recipe(),
            samples=samples,
        )
        parent = completed(trainer.train(step, ignore_status, never)).version
        merged = tmp_path / f"merged-{n}"
        merge(base, tmp_path / "adapters" / parent.path, merged)
        model = ToolCallModel(merged)
    after = model.success(HELD_OUT)
    # Of nine seeds the worst gained 0.46 and reached 0.79.
    assert after >= before + 0.25, (before, after)
    assert after >= 0.65, (before, after)
