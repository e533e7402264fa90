"""A worker of environments in a Python environment of its own: without the data folder and the database."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from clawloop.app.local.checks import choose_port
from clawloop.app.local.parts import answers_ok
from clawloop.core.contracts.serving import Scope
from db.database import BACKGROUND_LIMIT, Database
from db.serving.keys import PostgresKeyStore
from tests.environments.foreign_python import FOREIGN

# Importing verifiers takes 10 s of a core; on two cores with a load of 40 it took minutes.
READY_SECONDS = 600


async def worker_key(url: str) -> str:
    database = Database(url, BACKGROUND_LIMIT)
    try:
        return (await PostgresKeyStore(database).create_key("default", {Scope.WORKER}, "worker"))[1]
    finally:
        await database.close()


@asynccontextmanager
async def foreign_worker(
    installed: Path, arguments: list[str], folder: Path, key: str, variables: Mapping[str, str] | None = None
) -> AsyncIterator[Path]:
    """Run it until the end of the block; yields its log.

    Args:
        installed: of its Python environment, the folder `bin`.
        folder: its home.
    """
    port = choose_port("the worker", "127.0.0.1", 0, "")
    command = [str(installed / "clawloop-environment"), *arguments, "--health-port", str(port)]
    own = {"PATH": os.environ["PATH"], "HOME": str(folder), "CLAWLOOP_WORKER_KEY": key, "PYTHONPATH": str(FOREIGN)}
    log = folder / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=own | dict(variables or {}),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not await answers_ok(f"http://127.0.0.1:{port}/readyz"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            await asyncio.sleep(0.2)
        yield log
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(line["message"] == "episode ran" for line in logged)


async def settled_groups(client: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
    """The groups that are not open, once there are so many."""
    async with asyncio.timeout(300):
        while True:
            groups = (await client.get("/admin/v1/rollout-groups")).json()["groups"]
            done = [group for group in groups if group["state"] != "open"]
            if len(done) >= count:
                return done
            await asyncio.sleep(0.5)
