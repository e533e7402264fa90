"""A sample that cannot be trained is refused by name or dropped with the reason; nothing becomes a silent zero."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from clawloop.core.contracts.training import BatchSample, StepFigures
from clawloop.core.errors import NothingToTrain, SampleUnusable
from clawloop.core.recipes.recipe import Loss, Optimiser, Train
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel, adapter_tensors, set_adapter
from clawloop.training.packing import Limits
from clawloop.training.step import make_optimizer, train_step
from tests.training.tiny import VOCAB, random_batch, relative_error, sample_id, shake_adapter

BAD = sample_id(99)
LIMITS = Limits(budget_tokens=4096, max_tokens=256, vocab_size=VOCAB)


@pytest.fixture
def model(qwen3: Path) -> PolicyModel:
    found = load_model(qwen3, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(found)
    return found


def step(model: PolicyModel, samples: list[BatchSample]) -> StepFigures:
    return train_step(model, make_optimizer(model, Optimiser()), samples, Train(), LIMITS, parent=1)


def followed(
    model: PolicyModel, samples: list[BatchSample], aggregation: Literal["token", "sequence"]
) -> tuple[StepFigures, dict[str, Tensor]]:
    """A step, and how it moved the adapter, which is then put back.

    By plain descent without a cut: AdamW's first step is as long however short the gradient is.
    """
    before = adapter_tensors(model)
    recipe = Train(loss=Loss(aggregation=aggregation), optimiser=Optimiser(grad_clip=1e9))
    plain = torch.optim.SGD(list(model.adapter_parameters().values()), lr=1e-3)
    report = train_step(model, plain, samples, recipe, LIMITS, parent=1)
    moved = {name: now - before[name] for name, now in adapter_tensors(model).items()}
    set_adapter(model, before)
    return report, moved


def spoiled(sample: BatchSample, **changes: object) -> BatchSample:
    return replace(sample, sample_id=BAD, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ({"logprobs": math.nan}, "behaviour_logprob_T has a number that is not finite"),
        ({"logprobs": -math.inf}, "behaviour_logprob_T has a number that is not finite"),
        ({"logprobs": 0.5}, "behaviour_logprob_T has a log-probability above 0"),
        ({"logprobs": None}, "behaviour_logprob_T is unknown at position 1"),
        ({"response_mask": False}, "of which none is trained"),
        ({"reward": math.inf}, "reward inf is not finite"),
        ({"reward": math.nan}, "reward nan is not finite"),
        ({"reward": 0.0}, "neither a verdict nor a hint"),
    ],
)
def test_a_sample_that_cannot_be_trained_is_dropped_with_the_reason(
    what: dict[str, float | None], reason: str, aggregation: Literal["token", "sequence"], model: PolicyModel
) -> None:
    good = random_batch(model)
    [(field, value)] = what.items()
    victim, changed = good[1], value
    changes: dict[str, object] = {field: changed}
    if field == "logprobs":
        changes[field] = [victim.logprobs[0], changed, *victim.logprobs[2:]]
    elif field == "response_mask":
        changes[field] = [changed] * len(victim.response_ids)
    others = [good[0], *good[2:]]
    alone, moved_alone = followed(model, others, aggregation)
    report, moved = followed(model, [good[0], spoiled(victim, **changes), *good[2:]], aggregation)
    assert list(report.dropped) == [BAD]
    assert reason in report.dropped[BAD]
    assert report.tokens == alone.tokens, "it dilutes nobody"
    assert report.loss == pytest.approx(alone.loss, rel=1e-5)
    assert relative_error(moved, moved_alone) < 1e-5
    with pytest.raises(NothingToTrain, match="no sample of 1 is left"):
        step(model, [spoiled(victim, **changes)])


def test_an_empty_batch_raises(model: PolicyModel) -> None:
    before = adapter_tensors(model)
    with pytest.raises(NothingToTrain, match="no sample of 0 is left"):
        step(model, [])
    assert all(torch.equal(before[name], now) for name, now in adapter_tensors(model).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"response_ids": []}, "log-probs of length 9 for 0 response tokens"),
        ({"response_ids": [], "logprobs": []}, "at least one token each"),
        ({"prompt_ids": []}, "at least one token each"),
        ({"logprobs": [-1.0]}, "log-probs of length 1 for 9 response tokens"),
        ({"response_mask": [True]}, "mask of length 1 for 9 response tokens"),
        ({"prompt_ids": [VOCAB]}, "the vocabulary has 199"),
        ({"hinted_prompts": {0: [-1]}}, f"{BAD} with hint: token ids -1"),
        ({"hinted_prompts": {0: [1] * 300}}, f"{BAD} with hint: 308 tokens, the trainer takes 256"),
        ({"temperature": 0.0}, "temperature 0.0"),
    ],
)
def test_a_malformed_sample_stops_the_step_and_is_named(
    changes: dict[str, object], message: str, model: PolicyModel
) -> None:
    good = random_batch(model)
    with pytest.raises(SampleUnusable, match=f"sample {BAD}.*{message}|sample {message}"):
        step(model, [good[0], spoiled(good[1], **changes)])
