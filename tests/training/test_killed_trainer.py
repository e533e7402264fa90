"""Trainers that are killed, or stopped and resumed, make the same adapters as an undisturbed one, each once."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest

from clawloop.app.local.checks import choose_port
from clawloop.core.contracts.training import StepState
from tests.training.bench import STEPS, TrainerBench, begin, bench, processes
from tests.training.dying_trainer import POINTS

__all__ = ["bench", "processes"]

assert len(POINTS) == STEPS


@pytest.mark.timeout(1800)
async def test_a_step_survives_kills_at_any_point_and_makes_the_same_adapter(
    bench: TrainerBench, processes: ExitStack, tmp_path: Path
) -> None:
    log = tmp_path / "trainer.log"
    begin(bench, processes, log, "tests.training.dying_trainer", bench.process().model_dump_json(), *POINTS)
    for n, point in enumerate(POINTS, start=1):
        await bench.claim(n)
        done = await asyncio.wait_for(bench.step(n), 240)
        assert (done.state, done.sha256) == (StepState.COMMITTED, bench.undisturbed[n].version.sha256), point
        assert f"life until {POINTS[n] if n < len(POINTS) else None}" in log.read_text(), point
    assert [row["n"] for row in bench.rows("SELECT n FROM versions WHERE n > 0 ORDER BY n")] == [*range(1, 7)]
    assert bench.rows("SELECT head FROM policies") == [{"head": 6}]
    assert bench.rows("SELECT state, count(*) FROM samples GROUP BY state") == [{"state": "trained", "count": 54}]
    # A step that was committed before the kill was answered, not taken again. Before that it may have been: a machine
    # may be so busy that a living trainer seems silent.
    _, committed, after = log.read_text().partition(f"step {len(POINTS)}: candidate")
    assert committed
    assert "loading the model" not in after
    folders = [path.name for path in (bench.setup.adapters / "default").iterdir() if not path.name.startswith(".")]
    assert len(folders) == len(POINTS)


@pytest.mark.timeout(1800)
@pytest.mark.long
async def test_two_trainers_with_the_same_step_commit_it_once(
    bench: TrainerBench, processes: ExitStack, tmp_path: Path
) -> None:
    await bench.claim(1)
    log = tmp_path / "stopped.log"
    process = bench.process().model_dump_json()
    begin(bench, processes, log, "tests.training.dying_trainer", process, "stopped: adapter is written")
    stepping = asyncio.create_task(bench.step(1))
    while (found := re.search(r"stopped (\d+)", log.read_text())) is None:
        await asyncio.sleep(0.05)
    other = ["--model", str(bench.setup.model), "--base-model", "tiny", "--data", str(tmp_path), "--pool", bench.pool]
    limits = ["--micro-batch-tokens", "40", "--threads", "1", "--device", "cpu"]
    begin(bench, processes, tmp_path / "other.log", "clawloop.app.cli.main", "worker", "trainer", *other, *limits)
    done = await asyncio.wait_for(stepping, 240)
    assert (done.state, done.sha256) == (StepState.COMMITTED, bench.undisturbed[1].version.sha256)
    await bench.claim(2)
    assert (await asyncio.wait_for(bench.step(2), 240)).state is StepState.COMMITTED
    committed = bench.rows("SELECT n, finished_at FROM steps ORDER BY n")

    os.kill(int(found[1]), signal.SIGCONT)
    while "step 1: committed" not in log.read_text():  # the other trainer made the version, and it was accepted
        await asyncio.sleep(0.05)
    assert bench.rows("SELECT n, finished_at FROM steps ORDER BY n") == committed
    assert bench.rows("SELECT head FROM policies") == [{"head": 2}]
    assert bench.rows("SELECT count(*) FROM versions WHERE n > 0") == [{"count": 2}]


@pytest.mark.timeout(200)
@pytest.mark.long
async def test_a_terminated_trainer_stops_between_micro_batches(
    bench: TrainerBench, processes: ExitStack, tmp_path: Path
) -> None:
    port = choose_port("the trainer", "127.0.0.1", 0, "")
    process = bench.process(health_port=port).model_dump_json()
    running = begin(bench, processes, tmp_path / "trainer.log", "tests.training.ranked_trainer", process)
    await bench.claim(1)
    assert (await asyncio.wait_for(bench.step(1), 240)).state is StepState.COMMITTED
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/readyz") as ready:
            assert ready.status == 200
        async with session.get(f"http://127.0.0.1:{port}/metrics") as metrics:
            assert 'clawloop_trainer_steps_total{result="trained"} 1.0' in await metrics.text()
    await bench.claim(2)
    attempts = "SELECT attempt FROM steps WHERE n = 2"
    before = bench.rows(attempts)
    stepping = asyncio.create_task(bench.step(2))
    while bench.rows(attempts) == before:
        await asyncio.sleep(0.005)
    running.terminate()
    assert await asyncio.to_thread(running.wait, 30) == 0
    # Whoever comes next goes on with the same batch.
    begin(bench, processes, tmp_path / "next.log", "tests.training.ranked_trainer", process)
    done = await asyncio.wait_for(stepping, 240)
    assert (done.state, done.sha256) == (StepState.COMMITTED, bench.undisturbed[2].version.sha256)
