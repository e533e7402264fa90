"""What publishing costs chats, with the trainer idle and with a busy trainer: gaps between tokens, time until active.

Everything is real: PostgreSQL, Temporal, vLLM on the random tiny model, gateway, orchestrator, the engine's agent. The
publishes are followed by an equal time without publishes, so that both kinds of gaps come from one run.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.load import percentile
from benchmarks.processes import free_port, module, running, running_temporal
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
WARM_UP_SECONDS = 3.0
TRAINER_SECONDS = 10.0
"""Until its steps have begun."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--publishes", type=int, default=None, help="in each state; default: 20; 5 with --quick")
    parser.add_argument("--clients", type=int, default=8)


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one state; seconds."""

    publishes: list[Publish]
    during: list[float]
    quiet: list[float]


def run(options: argparse.Namespace) -> Result:
    publishes = options.publishes or (5 if options.quick else 20)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        model = ensure_tiny_model(folder / "models")
        (folder / "data").mkdir()
        server = stack.enter_context(running_postgres(folder / "postgres"))
        migrate(server.url)
        temporal = stack.enter_context(running_temporal(folder / "temporal"))
        engine = stack.enter_context(running_engine(model, engine_options(model, free_port()), folder / "vllm.log"))
        versions = random_versions(model, folder / "data" / "adapters", range(1, len(STATES) * publishes + 1))
        each = {state: versions[n * publishes : (n + 1) * publishes] for n, state in enumerate(STATES)}
        measured = asyncio.run(_measure(server.url, temporal, engine, model, folder, each, options.clients))
    ratios = {
        f"tokens a second while versions are published to none, {state}": Ratio(
            len(found.during) / len(found.quiet), "higher"
        )
        for state, found in measured.items()
    }
    active = {
        f"until active, {state}": [publish.seconds for publish in found.publishes] for state, found in measured.items()
    }
    return Result([_row(state, found) for state, found in measured.items()], ratios, active)


def _row(state: str, measured: Measured) -> dict[str, Figure]:
    active = [publish.seconds for publish in measured.publishes]
    row: dict[str, Figure] = {
        "state": state,
        "publishes": len(active),
        "until active p50 s": median(active),
        "max s": max(active),
    }
    for when, gaps in (("during", measured.during), ("without", measured.quiet)):
        row |= {f"gap p99 ms {when}": percentile(gaps, 0.99) * 1000, f"max ms {when}": max(gaps) * 1000}
    return row


async def _measure(
    url: str,
    temporal: str,
    engine: str,
    model: Path,
    folder: Path,
    versions: Mapping[str, Sequence[VersionRef]],
    clients: int,
) -> dict[str, Measured]:
    """For each state its publishes, and gaps of the clients' streams during and after them."""
    data, measured = folder / "data", {}
    async with (
        running_gateway(url, await prepared(url, [engine]), data) as gateway,
        running_workers(data, url, temporal, ["orchestrator"], ["engine", "--engine", engine]),
        chatting(gateway.url, gateway.key, clients) as seen,
    ):
        await asyncio.sleep(WARM_UP_SECONDS)
        for state, ready in versions.items():
            with ExitStack() as stack:
                if state == "trainer busy":
                    stack.enter_context(running(module("benchmarks.busy_trainer", model), folder / "trainer.log"))
                    await asyncio.sleep(TRAINER_SECONDS)
                measured[state] = Measured(
                    *await gaps_with_and_without(seen, partial(publish_all, url, temporal, ready))
                )
    if seen.errors:
        raise RuntimeError(f"{len(seen.errors)} answers failed: {seen.errors[0]}")
    return measured
