"""How far a version moved: what the gate sees of a collapse that shows only after the update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clawloop.core.algorithms.streams import Streams
from clawloop.core.contracts.training import CheckResult
from clawloop.core.gate.checks import check_numbers
from clawloop.core.recipes.gate import TOKEN_LIMIT
from clawloop.core.recipes.recipe import Bounds, Gate, Optimiser, Train
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape
from clawloop.training.packing import Limits
from clawloop.training.ranks import Ranks
from clawloop.training.step import distance, make_optimizer, train_step
from tests.training.tiny import VOCAB, random_batch

LIMITS = Limits(budget_tokens=4096, max_tokens=256, vocab_size=VOCAB)


def test_a_collapse_that_the_figures_before_the_update_do_not_show_is_measured_after_it(qwen3: Path) -> None:
    checks = {}
    for lr in (1e-4, 1.0):
        model = load_model(qwen3, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
        recipe = Train(optimiser=Optimiser(lr=lr))
        samples = random_batch(model)
        figures = train_step(model, make_optimizer(model, recipe.optimiser), samples, recipe, LIMITS, parent=1)
        assert figures.kl is not None
        assert figures.kl < Bounds().kl
        assert figures.to_parent is not None
        assert figures.to_base is not None
        checks[lr] = check_numbers(figures, Gate())
    assert [check.result for check in checks.values()] == [CheckResult.PASSED, CheckResult.FAILED]
    assert "gate.parent_distance" in checks[1.0].reason


def test_a_token_counts_its_limit_at_most_and_masked_tokens_do_not_count() -> None:
    streams = {0: Streams(response_mask_T=torch.tensor([True, True, True, False]))}
    parent = {0: torch.zeros(4)}
    moved = distance({0: torch.tensor([-900.0, -3.0, -1.0, -900.0])}, parent, streams, 2.0, Ranks())
    assert moved is not None
    assert moved.mean == pytest.approx((TOKEN_LIMIT + 3.0 + 1.0) / 3)
    assert moved.median == pytest.approx(3.0)
    assert moved.share == pytest.approx(2 / 3)


def test_a_distance_that_is_not_known_for_all_samples_is_none() -> None:
    streams = {n: Streams(response_mask_T=torch.tensor([True])) for n in (0, 1)}
    known = {0: torch.zeros(1), 1: torch.zeros(1)}
    assert distance(known, {0: torch.zeros(1)}, streams, 2.0, Ranks()) is None
    assert distance(known, known, {}, 2.0, Ranks()) is None
