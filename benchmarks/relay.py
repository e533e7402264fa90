"""Measures the cost of a relayed token: our gateway, recording in PostgreSQL, and a plain relay that records nothing.

Both relay the same streams from the same stub engine in one run. CPU time is that of the gateway's process alone, so a
busy machine changes it little. Run as `make bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
from rich.console import Console
from rich.table import Table

from clawloop.local.checks import choose_port
from clawloop.local.services.postgres import running_postgres
from clawloop.processes.bootstrap import prepare


@dataclass(frozen=True)
class Cost:
    """The cost of one gateway's run.

    Args:
        cpu_seconds: of the gateway's process.
        wall_seconds: of the whole run.
    """

    name: str
    streams: int
    tokens: int
    cpu_seconds: float
    wall_seconds: float

    @property
    def microseconds_per_token(self) -> float:
        return self.cpu_seconds / (self.streams * self.tokens) * 1e6

    @property
    def milliseconds_per_request(self) -> float:
        return self.cpu_seconds / self.streams * 1e3


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engine_port, plain_port, our_port = (choose_port("a", "127.0.0.1", 0, "") for _ in range(3))
        engine = f"http://127.0.0.1:{engine_port}"
        stack.enter_context(
            _module("benchmarks.stub_engine", str(engine_port), str(options.tokens), str(options.milliseconds))
        )
        postgres = stack.enter_context(running_postgres(Path(folder) / "postgres"))
        keys = asyncio.run(prepare(postgres.url, "tiny", [], [engine], {}))
        plain = stack.enter_context(_module("benchmarks.plain_relay", str(plain_port), engine))
        ours = stack.enter_context(
            _module(
                "clawloop.cli.main", "gateway", "--port", str(our_port), "--data", folder, DATABASE_URL=postgres.url
            )
        )
        ports = {"plain relay (FastAPI + httpx)": (plain, plain_port), "clawloop, recording": (ours, our_port)}
        costs = [
            asyncio.run(_measure(name, process, port, keys["chat"], options)) for name, (process, port) in ports.items()
        ]
        _report(costs)


async def _measure(
    name: str, process: subprocess.Popen[bytes], port: int, key: str, options: argparse.Namespace
) -> Cost:
    url = f"http://127.0.0.1:{port}"
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as client:
        await _until_up(client, url)
        await asyncio.gather(*(_stream(client, url, n) for n in range(8)))  # warm-up
        watched = psutil.Process(process.pid)
        before, began = watched.cpu_times(), time.perf_counter()
        for first in range(0, options.streams, options.at_once):
            count = min(options.at_once, options.streams - first)
            await asyncio.gather(*(_stream(client, url, first + n) for n in range(count)))
        after = watched.cpu_times()
        cpu = after.user + after.system - before.user - before.system
    return Cost(name, options.streams, options.tokens, cpu, time.perf_counter() - began)


async def _stream(client: aiohttp.ClientSession, url: str, number: int) -> None:
    body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": f"question {number}"}]}
    async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
        content = await answer.read()
        if answer.status != 200 or not content.endswith(b"data: [DONE]\n\n"):
            raise RuntimeError(f"{url} answered {answer.status}: {content[-200:]!r}")


async def _until_up(client: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        try:
            async with client.get(f"{url}/readyz") as answer:
                if answer.status in {200, 404}:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} does not become ready")


@contextmanager
def _module(name: str, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", name, *arguments], env=dict(os.environ) | environment, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def _report(costs: list[Cost]) -> None:
    table = Table("gateway", "CPU µs per token", "CPU ms per request", "requests per CPU-second", "wall s")
    for cost in costs:
        table.add_row(
            cost.name,
            f"{cost.microseconds_per_token:.0f}",
            f"{cost.milliseconds_per_request:.2f}",
            f"{cost.streams / cost.cpu_seconds:.0f}",
            f"{cost.wall_seconds:.1f}",
        )
    console = Console()
    console.print(table)
    plain, ours = costs
    console.print(f"ratio, ours to plain: {ours.cpu_seconds / plain.cpu_seconds:.2f}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--milliseconds", type=float, default=20, help="between tokens")
    return parser.parse_args()


if __name__ == "__main__":
    main()
