"""What publishing costs chats: gaps between tokens, time until active, by the clients and with a busy trainer or none.

Everything is real: PostgreSQL, Temporal, vLLM on the random tiny model, gateway, orchestrator, the engine's agent. The
publishes are followed by an equal time without publishes, so that both kinds of gaps come from one run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.load import percentile
from benchmarks.options import sizes
from benchmarks.processes import free_port, kept_busy, module, running, running_temporal, wait_for_first_step
from benchmarks.report import Figure, Ratio, Result
from clawloop.contracts.training import VersionRef
from clawloop.local.services.postgres import running_postgres
from clawloop.local.tiny_model import ensure_tiny_model
from db.schema import migrate
from tests.e2e.adapters import random_versions
from tests.e2e.conftest import running_engine
from tests.e2e.gateway import prepared, running_gateway
from tests.e2e.publishing import Publish, chatting, gaps_with_and_without, publish_all
from tests.e2e.workers import running_workers
from tests.engine_options import engine_options

STATES = ("trainer idle", "trainer busy")
Case = tuple[str, int]
"""State and clients."""
WARM_UP_SECONDS = 3.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--publishes", type=int, default=None, help="in each row; default: 20; 5 with --quick")
    parser.add_argument("--clients", type=sizes, default=None, help="default: 2,8,32; 2,8 with --quick")


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one state and number of clients; seconds."""

    publishes: list[Publish]
    during: list[float]
    quiet: list[float]


def run(options: argparse.Namespace) -> Result:
    publishes = options.publishes or (5 if options.quick else 20)
    clients = options.clients or ([2, 8] if options.quick else [2, 8, 32])
    cases = [(state, number) for state in STATES for number in clients]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = ensure_tiny_model(folder / "models")
        (folder / "data").mkdir()
        server = stack.enter_context(running_postgres(folder / "postgres"))
        migrate(server.url)
        temporal = stack.enter_context(running_temporal(folder / "temporal"))
        engine = stack.enter_context(running_engine(model, engine_options(model, free_port()), folder / "vllm.log"))
        versions = random_versions(model, folder / "data" / "adapters", range(1, len(cases) * publishes + 1))
        each = {case: versions[n * publishes : (n + 1) * publishes] for n, case in enumerate(cases)}
        measured = asyncio.run(_measure(server.url, temporal, engine, model, folder, each))
    return result_of(measured)


def result_of(measured: Mapping[Case, Measured]) -> Result:
    active = {case: [publish.seconds for publish in found.publishes] for case, found in measured.items()}
    ratios = {
        f"{clients} clients, {state}: tokens a second while versions are published to none": Ratio(
            len(found.during) / len(found.quiet), "higher", enough=1.0
        )
        for (state, clients), found in measured.items()
    }
    for state in STATES:
        numbers = [clients for one, clients in measured if one == state]
        least, most = min(numbers), max(numbers)
        if most > least:
            growth = median(active[state, most]) / median(active[state, least])
            ratios[f"{state}: until active, {most} clients to {least}"] = Ratio(growth, "lower", most / least, 1.0)
    raw = {f"until active, {state}, {clients} clients": seconds for (state, clients), seconds in active.items()}
    return Result([_row(case, found) for case, found in measured.items()], ratios, raw)


def _row(case: Case, measured: Measured) -> dict[str, Figure]:
    active = [publish.seconds for publish in measured.publishes]
    row: dict[str, Figure] = {
        "clients": case[1],
        "state": case[0],
        "publishes": len(active),
        "until active p50 s": median(active),
        "max s": max(active),
    }
    for when, gaps in (("during", measured.during), ("without", measured.quiet)):
        row |= {f"gap p99 ms {when}": percentile(gaps, 0.99) * 1000, f"max ms {when}": max(gaps) * 1000}
    return row


async def _measure(
    url: str, temporal: str, engine: str, model: Path, folder: Path, versions: Mapping[Case, Sequence[VersionRef]]
) -> dict[Case, Measured]:
    """For each case its publishes, and gaps of the clients' streams during and after them."""
    data, log, measured = folder / "data", folder / "trainer.log", {}
    async with (
        running_gateway(url, await prepared(url, [engine]), data) as gateway,
        running_workers(data, url, temporal, ["orchestrator"], ["engine", "--engine", engine]),
    ):
        with ExitStack() as stack:
            trainer = None
            for (state, clients), ready in versions.items():  # with an idle trainer first
                if state == "trainer busy" and trainer is None:
                    trainer = stack.enter_context(running(module("benchmarks.busy_trainer", model), log))
                    await wait_for_first_step(trainer, log)
                async with chatting(gateway.url, gateway.key, clients, sessions=f"{state} {clients} ") as seen:
                    await asyncio.sleep(WARM_UP_SECONDS)
                    with nullcontext() if trainer is None else kept_busy(trainer, log):
                        found = await gaps_with_and_without(seen, partial(publish_all, url, temporal, ready))
                if seen.errors:
                    raise RuntimeError(f"{len(seen.errors)} answers failed: {seen.errors[0]}")
                measured[state, clients] = Measured(*found)
                print(f"{time.strftime('%H:%M:%S')} {clients} clients, {state}", flush=True)
    return measured
