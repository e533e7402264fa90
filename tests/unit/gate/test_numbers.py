"""The check of a step's numbers: each figure beyond its limit is named with its key."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.contracts.training import CheckResult, Distance, StepFigures
from clawloop.core.gate.checks import check_numbers
from clawloop.core.recipes.recipe import Gate

HEALTHY = StepFigures(
    loss=0.4,
    parts={"policy_gradient": 0.4},
    grad_norm=1.5,
    ratio=1.0,
    kl=30.0,  # one rare token: reported, and not compared with anything
    tokens=80,
    samples={},
    dropped={},
    micro_batches=1,
    fillers=0,
    to_parent=Distance(mean=0.1, median=0.02, share=0.01),
    to_base=Distance(mean=0.4, median=0.1, share=0.05),
)


def test_healthy_numbers_pass_whatever_the_unbounded_mean_says() -> None:
    check = check_numbers(HEALTHY, Gate())
    assert (check.result, check.reason) == (CheckResult.PASSED, "within limits")
    assert check.figures["parent_distance"] == 0.1


@pytest.mark.parametrize(
    ("figures", "key"),
    [
        (replace(HEALTHY, loss=-2000.0), "gate.loss"),
        (replace(HEALTHY, grad_norm=math.nan), "gate.grad_norm"),
        (replace(HEALTHY, to_parent=Distance(mean=0.64, median=0.0, share=0.05)), "gate.parent_distance"),
        (replace(HEALTHY, to_parent=Distance(mean=0.3, median=0.0, share=0.13)), "gate.token_share"),
        (replace(HEALTHY, to_base=Distance(mean=3.5, median=3.0, share=0.9)), "gate.base_distance"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_number_beyond_its_limit_fails_with_its_key(figures: StepFigures, key: str) -> None:
    check = check_numbers(figures, Gate())
    assert check.result is CheckResult.FAILED
    assert f"({key})" in check.reason


def test_what_was_not_measured_is_not_compared() -> None:
    check = check_numbers(replace(HEALTHY, to_parent=None, to_base=None), Gate())
    assert check.result is CheckResult.PASSED
    assert check.figures["base_distance"] is None


@given(st.floats(0, 5), st.floats(0.01, 5))
def test_a_distance_fails_exactly_above_its_limit(mean: float, limit: float) -> None:
    figures = replace(HEALTHY, to_parent=Distance(mean=mean, median=0.0, share=0.0))
    failed = check_numbers(figures, Gate(parent_distance=limit)).result is CheckResult.FAILED
    assert failed == (mean > limit)
