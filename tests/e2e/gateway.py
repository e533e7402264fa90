"""A real gateway process in front of a real engine and a real database."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from clawloop.app.local.checks import choose_port
from clawloop.app.processes.bootstrap import prepare
from clawloop.core.contracts.turns import StoredTurn
from clawloop.core.encryption.key_file import SETTING
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.ids import turn_id_of
from db.content import PLAIN, ContentCodec
from db.database import BACKGROUND_LIMIT, Database
from db.turns.insert import PostgresTurnStore

START_SECONDS = 240


@dataclass
class RealGateway:
    """
    Attributes:
        process: tests that start their own gateway stop or kill it.
        content: how it stores conversations.
    """

    url: str
    database_url: str
    key: str
    admin_key: str
    data: Path
    process: subprocess.Popen[bytes]
    content: ContentCodec = PLAIN

    def client(self, timeout: float = 120) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=timeout)

    async def turn(self, response_id: str) -> StoredTurn:
        """Read the turn of a response id from PostgreSQL; waits for it."""
        turn_id = turn_id_of(response_id)
        assert turn_id is not None
        database = Database(self.database_url, BACKGROUND_LIMIT, self.content)
        try:
            # On a busy machine a turn may go through the spool.
            async with asyncio.timeout(60):
                while (stored := await PostgresTurnStore(database).load(turn_id)) is None:
                    await asyncio.sleep(0.1)
        finally:
            await database.close()
        return stored


async def prepared(database_url: str, engines: Sequence[str], base_model: str = "tiny-random") -> dict[str, str]:
    return await prepare(database_url, base_model, ["qwen3-4b"], engines, {})


@asynccontextmanager
async def running_gateway(
    database_url: str, keys: dict[str, str], data: Path, port: int = 0, **environment: str
) -> AsyncIterator[RealGateway]:
    port = port or choose_port("the gateway", "127.0.0.1", 0, "")
    content = ContentCodec(Sealer(Path(environment[SETTING]))) if SETTING in environment else PLAIN
    data.mkdir(parents=True, exist_ok=True)
    with (data / "gateway.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "clawloop.app.cli.main", "gateway", "--port", str(port), "--data", str(data)],
            env=dict(os.environ) | {"DATABASE_URL": database_url} | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    gateway = RealGateway(f"http://127.0.0.1:{port}", database_url, keys["chat"], keys["admin"], data, process, content)
    try:
        # In a thread: a fake engine may live in this event loop.
        await asyncio.to_thread(_wait_until_ready, gateway)
        yield gateway
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)


def _wait_until_ready(gateway: RealGateway) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            answer = httpx.get(f"{gateway.url}/readyz")
            if answer.status_code == 200:
                return
            reason = answer.text
        except httpx.TransportError as error:
            reason = str(error)
        log = (gateway.data / "gateway.log").read_text()[-3000:]
        assert gateway.process.poll() is None, f"the gateway ended: {log}"
        assert time.monotonic() < deadline, f"the gateway is not ready: {reason} {log}"
        time.sleep(0.1)
