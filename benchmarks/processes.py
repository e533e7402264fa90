"""Starts the processes of a benchmark, waits for them, and reads their CPU time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import aiohttp
import psutil

from clawloop.app.local.checks import choose_port
from clawloop.app.local.services import temporal_server
from clawloop.app.local.supervision.supervisor import guarded
from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import register_search_attributes

LOOPBACK = "127.0.0.1"
# Imports of ten programs on two busy cores.
READY_SECONDS = 180.0


def free_port() -> int:
    return choose_port("a part", LOOPBACK, 0, "")


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program until the end of the block; its output goes to a file."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            env=dict(os.environ) | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=pass_fds,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)  # a gateway would go on after SIGTERM until its replies have ended
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def module(name: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", name, *map(str, arguments)]


@contextmanager
def running_temporal(folder: Path) -> Iterator[str]:
    """Temporal's development server with Clawloop's search attributes; yields its address."""
    ports = temporal_ports()
    process = start_temporal(folder, ports)
    try:
        yield f"{LOOPBACK}:{ports.main}"
    finally:
        stop(process)


def temporal_ports() -> temporal_server.Ports:
    return temporal_server.Ports(free_port(), free_port(), free_port())


def start_temporal(folder: Path, ports: temporal_server.Ports) -> subprocess.Popen[bytes]:
    """Returns once it is ready, with Clawloop's search attributes."""
    started = temporal_server.launch(folder, ports, os.environ)
    command = guarded(started.command, signal.SIGTERM, timedelta(seconds=3))
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, env=dict(started.environment), stdout=log, stderr=log)
    try:
        asyncio.run(_temporal_ready(ports))
    except BaseException:
        stop(process)
        raise
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(20)


async def _temporal_ready(ports: temporal_server.Ports) -> None:
    await until(lambda: temporal_server.is_ready(ports.http), "Temporal")
    await register_search_attributes(await connect(f"{LOOPBACK}:{ports.main}"))  # as the orchestrator does


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = READY_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} is not ready after {seconds:g} s")
        await asyncio.sleep(0.05)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Block until a GET is answered with 200."""

    async def is_up() -> bool:
        _require_running(process, log)
        return await answers(url)

    asyncio.run(until(is_up, log.stem))


def _require_running(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise RuntimeError(f"{log.stem} has ended: {log.read_text(errors='replace')[-2000:]}")


async def answers(url: str, statuses: Sequence[int] = (200,)) -> bool:
    limit = aiohttp.ClientTimeout(total=5)
    try:
        async with aiohttp.ClientSession(timeout=limit) as client, client.get(url) as answer:
            return answer.status in statuses
    except (aiohttp.ClientError, TimeoutError):
        return False


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """CPU time of a process and its children."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(process.pid)
        for one in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times = one.cpu_times()
                total += times.user + times.system
    return total


def cpu_by_part(parts: Mapping[str, str]) -> dict[str, float]:
    """CPU time of this process and of what it has started, by part.

    Args:
        parts: a part's name, and what its command line holds; the first that fits. What fits none is not counted.
    """
    root = psutil.Process()
    seconds = dict.fromkeys(parts, 0.0)
    for one in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(one.cmdline())
            part = next((name for name, held in parts.items() if held in command), None)
            if part is not None:
                times = one.cpu_times()
                # Also of its children that have ended, as PostgreSQL's connections do.
                seconds[part] += times.user + times.system + times.children_user + times.children_system
    return seconds


def busy_seconds() -> float:
    """CPU time that all programs of this machine have taken."""
    times = psutil.cpu_times()
    # A guest's time is in `user` already.
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def resident_megabytes(process: subprocess.Popen[bytes]) -> float:
    root = psutil.Process(process.pid)
    return float(sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))) / 2**20
