"""Two ranks under torchrun that take steps from Temporal, as one process would: idle, killed and restarted."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from clawloop.core.contracts.training import StepState, VersionRef
from clawloop.training.adapters.files import read_adapter
from clawloop.training.step_runner import StepRunner
from tests.training.bench import TrainerBench, begin, bench, processes

__all__ = ["bench", "processes"]

PING_INTERVAL = timedelta(seconds=1)
# Shorter than the test lets the ranks idle: without the no-op they would be gone. Not so short that a busy machine
# needs longer to connect them.
COMMAND_TIMEOUT = timedelta(seconds=12)


@pytest.mark.timeout(500)
@pytest.mark.long
async def test_two_ranks_restarted_after_a_death_train_as_one_process_does(
    bench: TrainerBench, processes: ExitStack, tmp_path: Path
) -> None:
    # Both runners read each other's versions.
    bench.undisturbed_runner = StepRunner(bench.setup)
    process = bench.process(nproc=2, ping_interval=PING_INTERVAL, command_timeout=COMMAND_TIMEOUT)
    agent = begin(bench, processes, tmp_path / "ranks.log", "tests.training.ranked_trainer", process.model_dump_json())
    await take(bench, 1)
    first = ranks(agent)
    await asyncio.sleep(COMMAND_TIMEOUT.total_seconds() * 1.25)
    await take(bench, 2)
    assert ranks(agent) == first

    # Killed while all wait.
    psutil.Process(first[1]).kill()
    second = await others(agent, first)
    await take(bench, 3)
    assert ranks(agent) == second

    # Killed in the middle of a step.
    await bench.claim(4)
    attempts = "SELECT attempt FROM steps WHERE n = 4"
    before = bench.rows(attempts)
    stepping = asyncio.create_task(bench.step(4))
    while bench.rows(attempts) == before:
        await asyncio.sleep(0.005)
    psutil.Process(second[1]).kill()
    assert (await stepping).state is StepState.COMMITTED
    assert ranks(agent) == await others(agent, second)
    compare(bench, 4)

    # Stopped, not dead: it is given up as well.
    third = ranks(agent)
    psutil.Process(third[1]).suspend()
    await others(agent, third, seconds=150)
    await take(bench, 5)


async def take(bench: TrainerBench, n: int) -> None:
    await bench.claim(n)
    done = await asyncio.wait_for(bench.step(n), 240)
    assert done.state is StepState.COMMITTED
    assert done.loss == pytest.approx(bench.undisturbed[n].figures.loss, abs=1e-5)
    compare(bench, n)


def compare(bench: TrainerBench, n: int) -> None:
    """The adapter of both ranks with the one made in this process."""
    [row] = bench.rows(f"SELECT path FROM versions WHERE n = {n}")
    alone: VersionRef = bench.undisturbed[n].version
    expected = read_adapter(bench.setup.adapters / alone.path).tensors
    found = read_adapter(bench.setup.adapters / row["path"]).tensors
    assert max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items()) < 1e-4
    assert any(float(tensor.abs().max()) > 1e-3 for name, tensor in expected.items() if "lora_B" in name)


def ranks(agent: subprocess.Popen[bytes]) -> list[int]:
    """Process ids, in order of rank."""
    by_rank: dict[str, int] = {}
    for child in psutil.Process(agent.pid).children():
        with suppress(psutil.Error):  # it is ending
            if "clawloop.app.processes.trainer" in child.cmdline():
                by_rank[child.environ()["RANK"]] = child.pid
    return [by_rank[rank] for rank in sorted(by_rank)]


async def others(agent: subprocess.Popen[bytes], before: list[int], seconds: float = 150) -> list[int]:
    """Wait until all ranks are new ones."""
    async with asyncio.timeout(seconds):
        while len(now := ranks(agent)) < len(before) or set(now) & set(before):
            await asyncio.sleep(0.1)
    return now
