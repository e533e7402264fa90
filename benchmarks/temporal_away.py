"""What a chat notices of Temporal: three gateways, one with Temporal up, one with it hanging, one with it ended.

All three record in the same PostgreSQL and stand before the same stub engine; each has a Temporal development server
of its own and is measured in turn with the others, so that a busy machine slows all three alike. Run as
`make bench-temporal`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from clawloop.local.checks import choose_port
from clawloop.local.services import temporal_server
from clawloop.local.services.postgres import running_postgres
from clawloop.processes.bootstrap import prepare
from clawloop.temporal.client import connect, register_search_attributes

LOOPBACK = "127.0.0.1"


@dataclass
class Way:
    """
    Args:
        first_seconds, whole_seconds: of each chat, to its first byte and to its last.
    """

    name: str
    url: str
    temporal: subprocess.Popen[bytes]
    first_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        engine_port = _port()
        engine = f"http://{LOOPBACK}:{engine_port}"
        stub = ("-m", "benchmarks.stub_engine", str(engine_port), str(options.tokens), str(options.milliseconds))
        stack.enter_context(_process([sys.executable, *stub]))
        postgres = stack.enter_context(running_postgres(Path(folder) / "postgres"))
        keys = asyncio.run(prepare(postgres.url, "tiny", [], [engine], {}))
        ways = [
            stack.enter_context(_way(name, Path(folder) / str(number), postgres.url))
            for number, name in enumerate(("up", "hanging", "ended"))
        ]
        asyncio.run(_measure(ways, keys["chat"], options))
        _report(ways)


@contextmanager
def _way(name: str, folder: Path, database_url: str) -> Iterator[Way]:
    """A gateway with a Temporal of its own."""
    ports = temporal_server.Ports(_port(), _port(), _port())
    folder.mkdir()
    started = temporal_server.launch(folder, ports, os.environ)
    port = _port()
    given = {"DATABASE_URL": database_url, "TEMPORAL_ADDRESS": f"{LOOPBACK}:{ports.main}"}
    command = [sys.executable, "-m", "clawloop.cli.main", "gateway", "--port", str(port), "--data", str(folder)]
    with _process(list(started.command), **started.environment) as temporal, _process(command, **given):
        asyncio.run(_ready(ports))
        yield Way(name, f"http://{LOOPBACK}:{port}", temporal)


async def _ready(ports: temporal_server.Ports) -> None:
    await _until(lambda: temporal_server.is_ready(ports.http))
    await register_search_attributes(await connect(f"{LOOPBACK}:{ports.main}"))  # as the orchestrator does


async def _measure(ways: list[Way], key: str, options: argparse.Namespace) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as client:
        for way in ways:
            await _until(partial(_is_ready, client, way.url))
            for number in range(8):  # warm, and connected to Temporal
                await _chat(client, way, -number)
            await _until(partial(_announced, client, way.url))
            way.first_seconds.clear()
            way.whole_seconds.clear()
        _, hanging, ended = ways
        hanging.temporal.send_signal(signal.SIGSTOP)
        ended.temporal.terminate()
        ended.temporal.wait(20)
        for number in range(options.chats):
            order = ways[number % 3 :] + ways[: number % 3]
            for way in order:
                await asyncio.gather(*(_chat(client, way, number) for _ in range(options.at_once)))
        for way in (hanging, ended):
            if not await _left(client, way.url):
                raise RuntimeError(f"with Temporal {way.name} no turn was left to the sweep: it was not away")


async def _chat(client: aiohttp.ClientSession, way: Way, number: int) -> None:
    body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": f"question {number}"}]}
    began = time.perf_counter()
    async with client.post(f"{way.url}/v1/chat/completions", json=body) as answer:
        first = await answer.content.readany()
        first_seconds = time.perf_counter() - began
        content = first + await answer.content.read()
    if answer.status != 200 or not content.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"{way.url} answered {answer.status}: {content[-200:]!r}")
    way.first_seconds.append(first_seconds)
    way.whole_seconds.append(time.perf_counter() - began)


async def _is_ready(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def _announced(client: aiohttp.ClientSession, url: str) -> bool:
    return await _announcements(client, url, "told") > 0


async def _left(client: aiohttp.ClientSession, url: str) -> bool:
    return await _announcements(client, url, "left to the sweep") > 0


async def _announcements(client: aiohttp.ClientSession, url: str, result: str) -> float:
    async with client.get(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    name = "clawloop_gateway_announcements_total"
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if sample.labels["result"] == result)


async def _until(true: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(300):
        if await true():
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("a part does not come up")


@contextmanager
def _process(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, env=dict(os.environ) | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)  # a stopped one could not end
        process.terminate()
        process.wait(20)


def _port() -> int:
    return choose_port("a part", LOOPBACK, 0, "")


def _report(ways: list[Way]) -> None:
    table = Table("Temporal", "chats", "first token ms: median", "p95", "whole answer ms: median", "p95")
    for way in ways:
        cells = [f"{value * 1e3:.1f}" for times in (way.first_seconds, way.whole_seconds) for value in _spread(times)]
        table.add_row(way.name, str(len(way.whole_seconds)), *cells)
    console = Console()
    console.print(table)
    up, *away = [_spread(way.whole_seconds)[0] for way in ways]
    ratios = ", ".join(f"{way.name} {median / up:.2f}" for way, median in zip(ways[1:], away, strict=True))
    console.print(f"whole answer, median beside Temporal up: {ratios}")


def _spread(times: list[float]) -> tuple[float, float]:
    """Median and 95th percentile."""
    return statistics.median(times), statistics.quantiles(times, n=20)[-1]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=200, help="for each of the three, one after the other")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=2, help="between tokens")
    return parser.parse_args()


if __name__ == "__main__":
    main()
