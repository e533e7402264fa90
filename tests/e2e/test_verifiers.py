"""An environment of verifiers, unchanged, in a worker with a Python environment of its own, through rollouts."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from clawloop.contracts.serving import Scope
from clawloop.local.checks import choose_port
from clawloop.local.parts import answers_ok
from db.database import BACKGROUND_LIMIT, Database
from db.serving.keys import PostgresKeyStore
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.e2e.workers import running_workers
from tests.environments.foreign_python import FOREIGN, foreign_python
from tests.fakes.engine import fake_engine
from tests.fakes.replies import Reply

SIZE = 4
# Importing verifiers takes 10 s of a core, and five times that on a machine that has others to serve.
READY_SECONDS = 240


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_episodes_of_verifiers_are_scored_and_make_samples(
    empty_postgres_url: str, temporal_address: str, tmp_path: Path
) -> None:
    installed = await asyncio.to_thread(foreign_python, tmp_path / "wheel")
    right = itertools.cycle((True, False))
    async with fake_engine() as engine:
        engine.script = lambda body: _reply(body, right)
        keys = await prepared(empty_postgres_url, [engine.url])
        gateways = running_gateway(
            empty_postgres_url, keys, tmp_path / "data", TEMPORAL_ADDRESS=temporal_address, CLAWLOOP_ARTIFACT_DAYS="3"
        )
        async with gateways as gateway:
            # Without the data folder and the database.
            worker = _worker(installed, gateway, temporal_address, await _worker_key(empty_postgres_url), tmp_path)
            orchestrator = running_workers(tmp_path, empty_postgres_url, temporal_address, ["orchestrator"])
            async with orchestrator, worker, gateway.client() as client:
                client.headers["Authorization"] = f"Bearer {gateway.admin_key}"
                started = {"environment": "vf_sums", "size": SIZE, "groups": 2}
                assert (await client.post("/admin/v1/rollouts/start", json=started)).status_code == 200
                groups = await _settled(client, 3)
                await client.post("/admin/v1/rollouts/pause", json={"reason": "enough"})
                episodes = (await client.get("/admin/v1/episodes", params={"limit": 500})).json()["episodes"]
    of_groups = [episode for episode in episodes if episode["group"] in {group["id"] for group in groups}]
    assert len(of_groups) == SIZE * len(groups)
    assert {(episode["state"], episode["ending"], episode["attempt"]) for episode in of_groups} == {
        ("scored", "completed", 1)
    }
    # Weighted as the environment says, by what it found in the conversation itself.
    assert {episode["reward"] for episode in of_groups} == {0.0, 2.0}
    assert {episode["turns"] for episode in of_groups} == {2}
    assert all(len(episode["sessions"]) == 1 for episode in of_groups)
    for episode in of_groups:
        digest = episode["artifact_sha256"]
        assert (tmp_path / "data" / "artifacts" / digest[:2] / f"{digest}.tar").is_file()
    _check_samples(empty_postgres_url)


def _reply(body: dict[str, Any], right: itertools.cycle[bool]) -> Reply:
    messages = body["messages"]
    if len(messages) == 1:
        return Reply("wait")
    found = re.fullmatch(r"What is (\d+) \+ (\d+)\? One number\.", messages[0]["content"])
    assert found is not None
    return Reply(str(int(found[1]) + int(found[2]) + (0 if next(right) else 1)))


async def _worker_key(url: str) -> str:
    database = Database(url, BACKGROUND_LIMIT)
    try:
        return (await PostgresKeyStore(database).create_key("default", {Scope.WORKER}, "worker"))[1]
    finally:
        await database.close()


@asynccontextmanager
async def _worker(
    installed: Path, gateway: RealGateway, temporal: str, key: str, folder: Path
) -> AsyncIterator[subprocess.Popen[bytes]]:
    port = choose_port("the worker", "127.0.0.1", 0, "")
    command = [str(installed / "clawloop-environment"), "--verifiers", "vf_sums", "--gateway", gateway.url]
    command += ["--temporal", temporal, "--health-port", str(port)]
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CLAWLOOP_WORKER_KEY": key,
        "PYTHONPATH": str(FOREIGN),
    }
    log = folder / "worker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not await answers_ok(f"http://127.0.0.1:{port}/readyz"):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            await asyncio.sleep(0.2)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(line["message"] == "episode ran" for line in logged)
    assert "What is" not in log.read_text()


async def _settled(client: httpx.AsyncClient, count: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(300):
        while True:
            groups = (await client.get("/admin/v1/rollout-groups")).json()["groups"]
            done = [group for group in groups if group["state"] != "open"]
            if len(done) >= count:
                return done
            await asyncio.sleep(0.5)


def _check_samples(url: str) -> None:
    with psycopg.connect(url) as connection:
        samples = connection.execute(
            "SELECT e.reward, s.reward FROM samples s JOIN turns t ON t.id = s.turn_id"
            " JOIN episodes e ON e.id = t.episode_id"
        ).fetchall()
        sampled = connection.execute("SELECT DISTINCT t.sampling->>'temperature' FROM turns t").fetchall()
    assert samples
    assert all((advantage > 0) == (reward == 2.0) for reward, advantage in samples)
    # The environment asked for 0.7, which cannot be trained.
    assert [float(temperature) for (temperature,) in sampled] == [1.0]
