"""What chats notice of judging and training beside them, on one machine.

Clients stream from vLLM on the random tiny model through a gateway. The judge, which asks the same engine, and a
trainer that never rests are suspended and continued, so that the four states alternate within one run. A state without
answers of its judge, or whose trainer does not compute, is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import median

import psycopg

from benchmarks import contenders
from benchmarks.load import percentile
from benchmarks.processes import (
    LOOPBACK,
    free_port,
    kept_busy,
    module,
    running,
    running_temporal,
    wait_for,
    wait_for_first_step,
)
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
        log = folder / "trainer.log"
        trainer = stack.enter_context(running(module("benchmarks.busy_trainer", model), log))
        stack.callback(_continue, workers["judge"], trainer)  # a suspended process does not stop
        asyncio.run(wait_for_first_step(trainer, log))
        measuring = _measure(gateway, postgres.url, options.clients, rounds, seconds, workers["judge"], trainer, log)
        measured, answers, seen = asyncio.run(measuring)
    if seen.errors:
        raise RuntimeError(f"{len(seen.errors)} answers failed: {seen.errors[0]}")
    rows = [_row(state, gaps, answers[state], rounds * seconds) for state, gaps in measured.items()]
    alone = len(measured["serving alone"])
    # Not the median gap: an engine on few cores sends several tokens together, whose gaps are next to none.
    ratios = {
        f"tokens a second, {state} to serving alone": Ratio(len(gaps) / alone, "higher")
        for state, gaps in measured.items()
        if state != "serving alone"
    }
    return Result(rows, ratios, {f"gaps, {state}": gaps for state, gaps in measured.items()})


def _row(state: str, gaps: list[float], answers: int, seconds: float) -> dict[str, Figure]:
    return {
        "state": state,
        "tokens/s": len(gaps) / seconds,
        "gap p50 ms": median(gaps) * 1000,
        "gap p99 ms": percentile(gaps, 0.99) * 1000,
        "gap max ms": max(gaps) * 1000,
        "answers of the judge": answers,
    }


async def _measure(
    gateway: contenders.Contender,
    database_url: str,
    clients: int,
    rounds: int,
    seconds: float,
    judge: subprocess.Popen[bytes],
    trainer: subprocess.Popen[bytes],
    trainer_log: Path,
) -> tuple[dict[str, list[float]], dict[str, int], Listener]:
    """By state its gaps, and how many answers of the judge were stored; what the clients saw."""
    gaps: dict[str, list[float]] = {state: [] for state in STATES}
    answers = dict.fromkeys(STATES, 0)
    async with (
        await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection,
        chatting(gateway.url, gateway.key, clients) as seen,
    ):
        for _ in range(rounds):
            for state, (judging, training) in STATES.items():
                judge.send_signal(signal.SIGCONT if judging else signal.SIGSTOP)
                trainer.send_signal(signal.SIGCONT if training else signal.SIGSTOP)
                before = await stored_answers(connection)
                await asyncio.sleep(SETTLE_SECONDS)
                began = time.perf_counter()
                with kept_busy(trainer, trainer_log) if training else nullcontext():
                    await asyncio.sleep(seconds)
                gaps[state] += seen.gaps_between(began, time.perf_counter())
                answers[state] += require_answers(state, judging, await stored_answers(connection) - before)
        _continue(judge, trainer)
    return gaps, answers, seen


async def stored_answers(connection: psycopg.AsyncConnection[tuple[int]]) -> int:
    """Of the judge, about votes and hints, whether they can be read or not."""
    found = await connection.execute("SELECT (SELECT count(*) FROM votes) + (SELECT count(*) FROM hints)")
    row = await found.fetchone()
    assert row is not None
    return row[0]


def require_answers(state: str, judging: bool, answers: int) -> int:
    """The answers that were stored in a state.

    Raises:
        RuntimeError: the judge should have run, and did not answer.
    """
    if judging and not answers:
        raise RuntimeError(f"{state}: no answer of the judge was stored")
    return answers


def _continue(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.send_signal(signal.SIGCONT)
