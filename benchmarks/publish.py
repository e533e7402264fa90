"""Measures what publishing costs chats: gaps between tokens, with the trainer idle and with a busy trainer.

    python -m benchmarks.publish [--publishes 20] [--clients 8]

Everything is real: PostgreSQL, Temporal, vLLM on the random tiny model, gateway, orchestrator, the engine's agent. The
publishes are followed by an equal time without publishes, so that both kinds of gaps come from one run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch

from clawloop.local.checks import choose_port
from clawloop.local.services import temporal_server
from clawloop.local.services.postgres import running_postgres
from clawloop.local.supervision.supervisor import guarded
from clawloop.local.tiny_model import ensure_tiny_model
from clawloop.training.packing.collate import collate
from clawloop.training.packing.sequences import TokenSequence
from db.schema import migrate
from tests.e2e.adapters import load_policy, random_versions
from tests.e2e.conftest import running_engine
from tests.e2e.gateway import prepared, running_gateway
from tests.e2e.publishing import chatting, gaps_with_and_without, publish_all, spread
from tests.e2e.workers import running_workers
from tests.engine_options import engine_options


@contextmanager
def _temporal(folder: Path) -> Iterator[str]:
    ports = temporal_server.Ports(*(choose_port("Temporal", temporal_server.HOST, 0, "") for _ in range(3)))
    started = temporal_server.launch(folder, ports, os.environ)
    command = guarded(started.command, signal.SIGTERM, timedelta(seconds=3))
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=dict(started.environment), stdout=log, stderr=log)
        try:
            while not asyncio.run(temporal_server.is_ready(ports.http)):
                if process.poll() is not None:
                    raise SystemExit((folder / "server.log").read_text()[-2000:])
            yield f"{temporal_server.HOST}:{ports.main}"
        finally:
            process.terminate()
            process.wait(10)


@contextmanager
def _trainer(model: Path) -> Iterator[None]:
    """Run a process that only computes training steps on the same model."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.publish", "--train", str(model)])
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def _train(model: Path) -> None:
    policy = load_policy(model)
    optimiser = torch.optim.AdamW(policy.adapter_parameters().values(), lr=1e-4)
    ids = torch.randint(1, 500, (16, 512)).tolist()
    packed = collate([TokenSequence(str(n), row[:256], row[256:], 1.0) for n, row in enumerate(ids)], range(16))
    while True:
        (-policy(packed).logprobs_N.mean()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()


async def _measure(url: str, temporal: str, engine: str, model: Path, data: Path, publishes: int, clients: int) -> None:
    versions = random_versions(model, data / "adapters", range(1, 2 * publishes + 1))
    agent = ["engine", "--engine", engine]
    async with running_gateway(url, await prepared(url, [engine]), data) as gateway:
        async with running_workers(data, url, temporal, ["orchestrator"], agent):
            async with chatting(gateway.url, gateway.key, clients) as seen:
                await asyncio.sleep(3)  # warm-up
                for name, ready in (("trainer idle", versions[:publishes]), ("trainer busy", versions[publishes:])):
                    with ExitStack() as stack:
                        if name == "trainer busy":
                            stack.enter_context(_trainer(model))
                            await asyncio.sleep(10)  # until its steps have begun
                        done, during, quiet = await gaps_with_and_without(
                            seen, partial(publish_all, url, temporal, ready)
                        )
                    print(f"{name}, {publishes} publishes, {clients} streams")
                    print(f"  from commit to active   {spread([publish.seconds for publish in done])}")
                    print(f"  gaps without publishes  {spread(quiet)}")
                    print(f"  gaps during publishes   {spread(during)}")
            print(f"{len(seen.answers)} answers, {len(seen.errors)} errors {seen.errors[:3]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--publishes", type=int, default=20)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        _train(options.train)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        for part in ("postgres", "temporal", "data"):
            (folder / part).mkdir()
        model = ensure_tiny_model(folder / "models")
        server = stack.enter_context(running_postgres(folder / "postgres"))
        migrate(server.url)
        temporal = stack.enter_context(_temporal(folder / "temporal"))
        options_of_engine = engine_options(model, choose_port("vLLM", "127.0.0.1", 0, ""))
        engine = stack.enter_context(running_engine(model, options_of_engine, folder / "vllm.log"))
        asyncio.run(_measure(server.url, temporal, engine, model, folder / "data", options.publishes, options.clients))


if __name__ == "__main__":
    main()
