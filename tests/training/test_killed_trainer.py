"""Trainers that are killed, or stopped and woken: one adapter for each step, the one an undisturbed trainer makes."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from clawloop.steps import StepState
from tests.training.dying_trainer import POINTS
from tests.training.shop import STEPS, Shop, begin, processes, shop

__all__ = ["processes", "shop"]

assert len(POINTS) == STEPS


@pytest.mark.timeout(400)
async def test_a_step_survives_kills_at_any_point_and_makes_the_same_adapter(
    shop: Shop, processes: ExitStack, tmp_path: Path
) -> None:
    log = tmp_path / "trainer.log"
    begin(shop, processes, log, "tests.training.dying_trainer", shop.process().model_dump_json(), *POINTS)
    for n, point in enumerate(POINTS, start=1):
        await shop.claim(n)
        done = await asyncio.wait_for(shop.step(n), 120)
        assert (done.state, done.sha256) == (StepState.COMMITTED, shop.undisturbed[n].version.sha256), point
        assert f"life until {POINTS[n] if n < len(POINTS) else None}" in log.read_text(), point
    assert [row["n"] for row in shop.rows("SELECT n FROM versions WHERE n > 0 ORDER BY n")] == [*range(1, 7)]
    assert shop.rows("SELECT head FROM policies") == [{"head": 6}]
    assert shop.rows("SELECT state, count(*) FROM samples GROUP BY state") == [{"state": "trained", "count": 54}]
    # A step that was committed before the kill was answered, not taken again.
    assert log.read_text().count(f"step {len(POINTS)}: begins") == 1
    folders = [path.name for path in (shop.setup.adapters / "default").iterdir() if not path.name.startswith(".")]
    assert len(folders) == len(POINTS)
