"""What chats notice of judging and training beside them, on one machine.

Clients stream from vLLM on the random tiny model through a gateway. The judge, which asks the same engine, and a
trainer that never rests are suspended and continued, so that the four states alternate within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks import contenders
from benchmarks.load import percentile
from benchmarks.processes import LOOPBACK, free_port, module, running, running_temporal, wait_for
from benchmarks.report import Figure, Ratio, Result
from clawloop.local.services.postgres import running_postgres
from clawloop.local.tiny_model import ensure_tiny_model
from clawloop.processes.bootstrap import prepare
from tests.e2e.conftest import running_engine
from tests.e2e.publishing import Listener, chatting
from tests.engine_options import engine_options

# State → whether the judge and the trainer run.
STATES = {
    "serving alone": (False, False),
    "judging": (True, False),
    "training": (False, True),
    "judging and training": (True, True),
}
# After a change of state, so that requests of the former one have ended.
SETTLE_SECONDS = 2.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=None, help="default: 4; 1 with --quick")
    parser.add_argument(
        "--seconds", type=float, default=None, help="of each state in a round; default: 15; 6 with --quick"
    )


def run(options: argparse.Namespace) -> Result:
    rounds, seconds = options.rounds or (1 if options.quick else 4), options.seconds or (6.0 if options.quick else 15.0)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = ensure_tiny_model(folder / "models")
        postgres = stack.enter_context(running_postgres(folder / "postgres"))
        temporal = stack.enter_context(running_temporal(folder / "temporal"))
        engine = stack.enter_context(running_engine(model, engine_options(model, free_port()), folder / "vllm.log"))
        keys = asyncio.run(prepare(postgres.url, model.name, [], [engine], {}))
        settings = {"DATABASE_URL": postgres.url, "TEMPORAL_ADDRESS": temporal, "CLAWLOOP_DATA": str(folder / "data")}
        gateway = stack.enter_context(
            contenders.gateway("clawloop", folder / "data", postgres.url, keys["chat"], temporal, 1)
        )
        workers = {}
        for role in ("orchestrator", "judge"):
            port = free_port()
            command = module("clawloop.cli.main", "worker", role, "--health-port", port)
            workers[role] = stack.enter_context(running(command, folder / f"{role}.log", settings))
            wait_for(f"http://{LOOPBACK}:{port}/readyz", workers[role], folder / f"{role}.log")
        trainer = stack.enter_context(running(module("benchmarks.busy_trainer", model), folder / "trainer.log"))
        stack.callback(_continue, workers["judge"], trainer)  # a suspended process does not stop
        time.sleep(SETTLE_SECONDS if options.quick else 10.0)  # until the trainer's steps have begun
        measured, seen = asyncio.run(
            _measure(gateway.url, keys["chat"], options.clients, rounds, seconds, workers["judge"], trainer)
        )
    if seen.errors:
        raise RuntimeError(f"{len(seen.errors)} answers failed: {seen.errors[0]}")
    rows = [_row(state, gaps, rounds * seconds) for state, gaps in measured.items()]
    alone = len(measured["serving alone"])
    # Not the median gap: an engine on few cores sends several tokens together, whose gaps are next to none.
    ratios = {
        f"tokens a second, {state} to serving alone": Ratio(len(gaps) / alone, "higher")
        for state, gaps in measured.items()
        if state != "serving alone"
    }
    return Result(rows, ratios, {f"gaps, {state}": gaps for state, gaps in measured.items()})


def _row(state: str, gaps: list[float], seconds: float) -> dict[str, Figure]:
    return {
        "state": state,
        "tokens/s": len(gaps) / seconds,
        "gap p50 ms": median(gaps) * 1000,
        "gap p99 ms": percentile(gaps, 0.99) * 1000,
        "gap max ms": max(gaps) * 1000,
    }


async def _measure(
    url: str,
    key: str,
    clients: int,
    rounds: int,
    seconds: float,
    judge: subprocess.Popen[bytes],
    trainer: subprocess.Popen[bytes],
) -> tuple[dict[str, list[float]], Listener]:
    gaps: dict[str, list[float]] = {state: [] for state in STATES}
    async with chatting(url, key, clients) as seen:
        for _ in range(rounds):
            for state, (judging, training) in STATES.items():
                judge.send_signal(signal.SIGCONT if judging else signal.SIGSTOP)
                trainer.send_signal(signal.SIGCONT if training else signal.SIGSTOP)
                await asyncio.sleep(SETTLE_SECONDS)
                began = time.perf_counter()
                await asyncio.sleep(seconds)
                gaps[state] += seen.gaps_between(began, time.perf_counter())
        _continue(judge, trainer)
    return gaps, seen


def _continue(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.send_signal(signal.SIGCONT)
