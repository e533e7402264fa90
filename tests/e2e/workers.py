"""Runs worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from clawloop.app.local.checks import choose_port
from clawloop.app.local.parts import answers_ok

# Imports take 2 s on an idle machine, more when tests share it.
START_SECONDS = 240
# They take 4 s on an idle machine.
STOP_SECONDS = 60


@asynccontextmanager
async def running_workers(
    data: Path, database_url: str, temporal: str, *commands: Sequence[str], **settings: str
) -> AsyncIterator[list[subprocess.Popen[bytes]]]:
    """Run `clawloop worker …` for each command until the end of the block; asserts that each exits with 0.

    Args:
        settings: further environment variables.
    """
    settings |= {"DATABASE_URL": database_url, "TEMPORAL_ADDRESS": temporal, "OMP_NUM_THREADS": "1"}
    workers, ports = [], []
    for command in commands:
        ports.append(choose_port("a worker", "127.0.0.1", 0, ""))
        with (data / f"{command[0]}.log").open("ab") as log:
            program = [
                sys.executable,
                "-m",
                "clawloop.app.cli.main",
                "worker",
                *command,
                "--health-port",
                str(ports[-1]),
            ]
            environment = dict(os.environ) | settings | {"CLAWLOOP_DATA": str(data)}
            workers.append(subprocess.Popen(program, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
    try:
        deadline = time.monotonic() + START_SECONDS
        for command, worker, port in zip(commands, workers, ports, strict=True):
            while not await answers_ok(f"http://127.0.0.1:{port}/readyz"):
                log_tail = (data / f"{command[0]}.log").read_text()[-3000:]
                assert worker.poll() is None, f"{command} ended: {log_tail}"
                assert time.monotonic() < deadline, f"{command} is not ready: {log_tail}"
                await asyncio.sleep(0.2)
        yield workers
    finally:
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
        for worker in workers:
            assert await asyncio.to_thread(worker.wait, STOP_SECONDS) == 0
