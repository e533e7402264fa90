"""Measures chat latency with Temporal up, hanging and stopped, with one gateway for each case.

The gateways share PostgreSQL and a stub engine; each has its own Temporal development server. They are measured in
turn, so that a busy machine slows all three alike. Run as `make bench ARGS="temporal"`.
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
from clawloop.temporal.namespace import register_search_attributes
from clawloop.temporal.plugin import connect

LOOPBACK = "127.0.0.1"


@dataclass
class GatewayCase:
    """A gateway with its Temporal server, and its measurements.

    Args:
        first_seconds, whole_seconds: of each chat, to the first byte and to the last.
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
        cases = [
            stack.enter_context(_run_case(name, Path(folder) / str(number), postgres.url))
            for number, name in enumerate(("up", "hanging", "ended"))
        ]
        asyncio.run(_measure(cases, keys["chat"], options))
        _report(cases)


@contextmanager
def _run_case(name: str, folder: Path, database_url: str) -> Iterator[GatewayCase]:
    """Run a gateway with its own Temporal server."""
    ports = temporal_server.Ports(_port(), _port(), _port())
    folder.mkdir()
    started = temporal_server.launch(folder, ports, os.environ)
    port = _port()
    settings = {"DATABASE_URL": database_url, "TEMPORAL_ADDRESS": f"{LOOPBACK}:{ports.main}"}
    command = [sys.executable, "-m", "clawloop.cli.main", "gateway", "--port", str(port), "--data", str(folder)]
    with _process(list(started.command), **started.environment) as temporal, _process(command, **settings):
        asyncio.run(_ready(ports))
        yield GatewayCase(name, f"http://{LOOPBACK}:{port}", temporal)


async def _ready(ports: temporal_server.Ports) -> None:
    await _until(lambda: temporal_server.is_ready(ports.http))
    await register_search_attributes(await connect(f"{LOOPBACK}:{ports.main}"))  # as the orchestrator does


async def _measure(cases: list[GatewayCase], key: str, options: argparse.Namespace) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as client:
        for case in cases:
            await _until(partial(_is_ready, client, case.url))
            for number in range(8):  # warm-up, and connects to Temporal
                await _chat(client, case, -number)
            await _until(partial(_has_notified, client, case.url))
            case.first_seconds.clear()
            case.whole_seconds.clear()
        _, hanging, ended = cases
        hanging.temporal.send_signal(signal.SIGSTOP)
        ended.temporal.terminate()
        ended.temporal.wait(20)
        for number in range(options.chats):
            order = cases[number % 3 :] + cases[: number % 3]
            for case in order:
                await asyncio.gather(*(_chat(client, case, number) for _ in range(options.at_once)))
        for case in (hanging, ended):
            if not await _has_pending(client, case.url):
                raise RuntimeError(f"with Temporal {case.name} every turn was notified: Temporal was not away")


async def _chat(client: aiohttp.ClientSession, case: GatewayCase, number: int) -> None:
    body = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": f"question {number}"}]}
    began = time.perf_counter()
    async with client.post(f"{case.url}/v1/chat/completions", json=body) as answer:
        first = await answer.content.readany()
        first_seconds = time.perf_counter() - began
        content = first + await answer.content.read()
    if answer.status != 200 or not content.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"{case.url} answered {answer.status}: {content[-200:]!r}")
    case.first_seconds.append(first_seconds)
    case.whole_seconds.append(time.perf_counter() - began)


async def _is_ready(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def _has_notified(client: aiohttp.ClientSession, url: str) -> bool:
    return await _notifications(client, url, "told") > 0


async def _has_pending(client: aiohttp.ClientSession, url: str) -> bool:
    return await _notifications(client, url, "left to the sweep") > 0


async def _notifications(client: aiohttp.ClientSession, url: str, result: str) -> float:
    async with client.get(f"{url}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    name = "clawloop_gateway_announcements_total"
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if sample.labels["result"] == result)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(300):
        if await condition():
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("a part does not become ready")


@contextmanager
def _process(command: list[str], **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command, env=dict(os.environ) | environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGCONT)  # a suspended process cannot terminate
        process.terminate()
        process.wait(20)


def _port() -> int:
    return choose_port("a part", LOOPBACK, 0, "")


def _report(cases: list[GatewayCase]) -> None:
    table = Table("Temporal", "chats", "first token ms: median", "p95", "whole answer ms: median", "p95")
    for case in cases:
        cells = [f"{value * 1e3:.1f}" for times in (case.first_seconds, case.whole_seconds) for value in _spread(times)]
        table.add_row(case.name, str(len(case.whole_seconds)), *cells)
    console = Console()
    console.print(table)
    up, *others = [_spread(case.whole_seconds)[0] for case in cases]
    ratios = ", ".join(f"{case.name} {median / up:.2f}" for case, median in zip(cases[1:], others, strict=True))
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
