"""Two gateways, workers and an engine under a supervisor, as `clawloop up` starts them, in front of a real database."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from clawloop.app.local import parts
from clawloop.app.local.checks import bound_socket, choose_port
from clawloop.app.local.parts import Deployment, answers_ok
from clawloop.app.local.supervision.supervisor import Launch, Part, Supervisor
from clawloop.app.processes.listener import QUEUED_CONNECTIONS
from tests.e2e.gateway import prepared
from tests.e2e.openclaw.engine_process import MODEL
from tests.local.status_recorder import StatusRecorder

ENGINE = "engine"
GATEWAYS = ("gateway-0", "gateway-1")
# A heartbeat waits until OpenClaw is idle.
PATIENCE_SECONDS = 300


@dataclass
class Stack:
    """
    Attributes:
        earlier: ids of the sessions that other tests began.
    """

    url: str
    key: str
    admin_key: str
    data: Path
    database_url: str
    temporal: str
    supervisor: Supervisor
    statuses: StatusRecorder
    requests_log: Path
    earlier: frozenset[str] = frozenset()
    _earlier_requests: int = 0

    async def begin(self) -> None:
        """Forget the sessions and requests until now."""
        self.earlier = frozenset(view["id"] for view in await self.all_sessions())
        self._earlier_requests = self._requests()

    async def all_sessions(self) -> list[dict[str, Any]]:
        async with self.admin() as client:
            answer = await client.get("/admin/v1/sessions", params={"limit": 500})
            assert answer.status_code == 200, answer.text
            return list(answer.json()["sessions"])

    def admin(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120)

    def requests(self) -> int:
        """How many requests the engine has got since the test began."""
        return self._requests() - self._earlier_requests

    async def asked_for(self, what: str) -> None:
        """Wait until the engine has got such a request since the test began."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while all(request["what"] != what for request in self.asked()):
                await asyncio.sleep(0.1)

    def asked(self) -> list[dict[str, Any]]:
        """What each request was about that the engine has got since the test began, and how often it held lessons."""
        return [json.loads(line) for line in self._lines()[self._earlier_requests :]]

    def _requests(self) -> int:
        return len(self._lines())

    def _lines(self) -> list[str]:
        return self.requests_log.read_text().splitlines() if self.requests_log.exists() else []


@asynccontextmanager
async def running_stack(
    folder: Path, database_url: str, temporal: str, engine: Callable[[int], Part] | None = None, judging: bool = False
) -> AsyncIterator[Stack]:
    """
    Args:
        engine: by its port; None: the scripted one, whose requests are counted.
        judging: there is a judge worker. The scripted engine has no opinion.
    """
    port = choose_port("the engine", parts.LOOPBACK, 0, "")
    engine_url = f"http://{parts.LOOPBACK}:{port}"
    data = folder / "data"
    data.mkdir(parents=True)
    keys = await prepared(database_url, [engine_url])
    deployment = Deployment(
        data, database_url, temporal, (engine_url,), MODEL, ("qwen3-4b",), keys, local_engines=(engine_url,)
    )
    statuses = StatusRecorder()
    supervisor = Supervisor(folder / "logs", statuses)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    with bound_socket("the gateway", parts.LOOPBACK, 0, "") as listener:
        listener.listen(QUEUED_CONNECTIONS)
        gateways = parts.gateways(deployment, listener, len(GATEWAYS), environment)
        workers = [
            part for part in parts.separate_workers(deployment, environment) if judging or part.name != parts.JUDGE
        ]
        try:
            first = _engine(port, folder / "requests") if engine is None else engine(port)
            for part in (first, *gateways, *workers):
                supervisor.start(part)
            await supervisor.all_ready()
            yield Stack(
                gateways[0].address,
                keys["chat"],
                keys["admin"],
                data,
                database_url,
                temporal,
                supervisor,
                statuses,
                folder / "requests",
            )
        finally:
            await supervisor.stop([[*GATEWAYS, *(worker.name for worker in workers)], [ENGINE]])


def _engine(port: int, log: Path) -> Part:
    command = (sys.executable, "-m", "tests.e2e.openclaw.engine_process", str(port), str(log))
    url = f"http://{parts.LOOPBACK}:{port}"
    return Part(
        name=ENGINE,
        address=url,
        prepare=lambda: Launch(command, dict(os.environ), Path(__file__).resolve().parents[3]),
        is_ready=lambda: answers_ok(f"{url}/health"),
        stop_within=timedelta(seconds=3),
    )
