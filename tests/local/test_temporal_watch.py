"""Whether Temporal answers, as pages and `status` tell it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from clawloop.app.cli.operations import TemporalProbe
from clawloop.app.local.checks import choose_port
from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import AWAY, TemporalWatch
from clawloop.core.settings import Settings
from clawloop.operations.overview import NO_TEMPORAL


async def _until(watch: TemporalWatch, problem: str | None) -> None:
    async with asyncio.timeout(60):
        while await watch.problem() != problem:
            await asyncio.sleep(0.01)


async def test_a_server_that_answers_is_no_problem(temporal_address: str, tmp_path: Path) -> None:
    watch = TemporalWatch(await connect(temporal_address, lazy=True), every_seconds=0.01)
    watch._answers = False
    async with watch:
        await _until(watch, None)
    probe = TemporalProbe(Settings.model_validate({"TEMPORAL_ADDRESS": temporal_address, "data": tmp_path}))
    assert await probe.problem() is None


async def test_one_that_does_not_is_told(tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{choose_port('Temporal', '127.0.0.1', 0, '')}"
    async with TemporalWatch(await connect(nowhere, lazy=True), every_seconds=0.01) as watch:
        await _until(watch, AWAY)
    async with TemporalWatch(None) as none:
        assert await none.problem() == NO_TEMPORAL
    probe = TemporalProbe(Settings.model_validate({"TEMPORAL_ADDRESS": nowhere, "data": tmp_path}))
    assert await probe.problem() == f"Temporal does not answer at {nowhere}"
    # On a machine that knows the database alone nobody says where Temporal is.
    assert await TemporalProbe(Settings.model_validate({"data": tmp_path})).problem() is None
