"""A gateway and a judge as processes of their own, with a collector in their environment."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
from temporalio.client import Client
from temporalio.worker import Worker

from clawloop.app.temporal.plugin import connect
from clawloop.core.contracts.serving import Scope
from clawloop.core.recipes.recipe import Recipe
from db.database import Database
from db.serving.directory import ensure_policy
from db.serving.engines import add_engine
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe
from tests.contract.conftest import TEST_LIMIT
from tests.fakes.engine import fake_engine
from tests.spans import Collector, kept_spans
from tests.workflows.conftest import end_all, until
from workflows import names
from workflows.session import SessionWorkflow

JUDGED = "RunActivity:judge_turn"


@contextmanager
def process(environment: dict[str, str], *words: str, fd: int | None = None) -> Iterator[None]:
    """A command of `clawloop`, stopped at the end as `up` stops it."""
    running = subprocess.Popen(
        [sys.executable, "-m", "clawloop.app.cli.main", *words],
        env=dict(os.environ) | environment,
        pass_fds=() if fd is None else (fd,),
    )
    try:
        yield
    finally:
        running.terminate()
        assert running.wait(60) in (0, -signal.SIGTERM)  # a gateway ends by the signal


async def talk(chats: httpx.AsyncClient) -> None:
    """A session of two turns."""
    said = [{"role": "user", "content": f"hello {uuid4()}"}]
    for _ in range(2):
        answer = await chats.post("/v1/chat/completions", json={"model": "policy", "messages": said})
        assert answer.status_code == 200
        said = [*said, answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]


async def test_processes_send_their_spans_and_share_traces(
    client: Client, temporal_address: str, postgres_url: str, tmp_path: Path
) -> None:
    database = Database(postgres_url, TEST_LIMIT)
    await ensure_policy(database, "default", "tiny", [])
    await ensure_recipe(database, "default", Recipe(name="combined"))
    _, secret = await PostgresKeyStore(database).create_key("default", {Scope.CHAT}, "test")
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with fake_engine() as engine:
        await add_engine(database, engine.url)
        with Collector() as collector, kept_spans(), listener:
            traced = await connect(temporal_address)  # as an orchestrator's, which hands a trace on
            environment = {
                "DATABASE_URL": postgres_url,
                "TEMPORAL_ADDRESS": temporal_address,
                "CLAWLOOP_DATA": str(tmp_path),
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "100",
            }
            gateway = process(environment, "gateway", "--fd", str(listener.fileno()), fd=listener.fileno())
            async with Worker(traced, task_queue=names.WORKFLOW_QUEUE, workflows=[SessionWorkflow]):
                with gateway, process(environment, "worker", "judge"):
                    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": secret}, timeout=120) as chats:
                        async with asyncio.timeout(240):
                            # A turn that waited in the spool begins a trace of its own: a busy machine needs another.
                            while not collector.traces(JUDGED) & collector.traces("chat"):
                                before = collector.traces(JUDGED)
                                await talk(chats)
                                await until(lambda before=before: collector.traces(JUDGED) != before)  # type: ignore[misc]
                    await until(lambda: {"engine", "record turn"} <= collector.spans().keys())
                await end_all(client)
    await database.close()
    spans = collector.spans()
    assert {spans[name] for name in ("chat", "engine", "record turn")} == {"clawloop-gateway"}
    assert spans[JUDGED] == "clawloop-judge"
