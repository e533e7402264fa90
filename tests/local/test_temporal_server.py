"""Temporal's development server: it keeps its data when killed, and closed workflows for 30 days."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import httpx
import psutil
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client

from clawloop.app.local import checks, parts
from clawloop.app.local.services import temporal_server
from clawloop.app.local.supervision.supervisor import PartState, Supervisor
from tests.local.status_recorder import StatusRecorder


async def retention_days(address: str) -> float:
    client = await Client.connect(address)
    described = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
    return described.config.workflow_execution_retention_ttl.seconds / 86400


async def terminated_by_a_page(port: int, host: str) -> int:
    """The status of what any page in the user's browser may send without asking, or under a rebound name."""
    terminate = f"http://127.0.0.1:{port}/api/v1/namespaces/default/workflows/kept/terminate"
    headers = {"Host": f"{host}:{port}", "Origin": "https://evil.example", "Content-Type": "text/plain"}
    async with httpx.AsyncClient(timeout=60) as client:
        return (await client.post(terminate, content=b"{}", headers=headers)).status_code


async def test_a_started_workflow_survives_the_kill_of_its_server(tmp_path: Path) -> None:
    ports = temporal_server.Ports(*(checks.choose_port("Temporal", "127.0.0.1", 0, "") for _ in range(3)))
    statuses = StatusRecorder()
    supervisor = Supervisor(tmp_path / "logs", statuses)
    address = f"127.0.0.1:{ports.main}"
    try:
        supervisor.start(parts.temporal(tmp_path / "temporal", ports, os.environ))
        await supervisor.ready("temporal")
        assert await retention_days(address) == 30
        assert await parts.answers_ok(f"http://127.0.0.1:{ports.ui}")
        client = await Client.connect(address)
        started = await client.start_workflow("Anything", id="kept", task_queue="nobody")
        assert [await terminated_by_a_page(ports.http, host) for host in ("127.0.0.1", "evil.example")] == [403, 403]
        children = psutil.Process().children(recursive=True)
        server = next(p for p in children if p.name() == "temporal" and str(tmp_path) in " ".join(p.cmdline()))
        server.kill()
        await statuses.until("temporal", PartState.READY, times=2)
        described = await (await Client.connect(address)).get_workflow_handle("kept").describe()
        assert described.run_id == started.result_run_id
        assert await retention_days(address) == 30
    finally:
        await supervisor.stop([["temporal"]])
    with closing(sqlite3.connect(tmp_path / "temporal" / "temporal.db")) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_failed_workflow_tasks_are_tried_again_within_seconds(tmp_path: Path) -> None:
    """By default the server waits up to ten minutes, and training with it."""
    command = temporal_server.launch(tmp_path, temporal_server.Ports(1, 2, 3), {}).command
    assert ("--dynamic-config-value", 'history.workflowTaskRetryMaxInterval="5s"') in pairwise(command)


async def test_is_ready_is_false_where_nothing_listens() -> None:
    port = checks.choose_port("Temporal", "127.0.0.1", 0, "")
    assert not await temporal_server.is_ready(port)
