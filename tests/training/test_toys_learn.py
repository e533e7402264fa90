"""The shipped toys learn from groups of episodes by their demos' recipes: real steps, replies sampled here."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawloop.app.demo.toys import toy_of
from tests.training.practice import practise

HELD_OUT = [f"test-{number}" for number in range(96)]


@pytest.mark.long
@pytest.mark.timeout(1800)  # a minute of a core each, and a machine may be busy with other things
@pytest.mark.parametrize(
    ("environment", "steps", "gain", "reached"),
    [("tool-call", 16, 0.25, 0.65), ("terminal", 12, 0.15, 0.4), ("swe", 6, 0.15, 0.45)],
)
def test_some_steps_teach_it(environment: str, steps: int, gain: float, reached: float, tmp_path: Path) -> None:
    before, after = practise(
        toy_of(environment), tmp_path, seed=1, steps=steps, measure_at=(0, steps), held_out=HELD_OUT
    )
    assert after.success >= before.success + gain, (before, after)
    assert after.success >= reached, (before, after)
