"""Rollouts from the command line to the settled group: every process real, but the engine, which answers nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.rows import dict_row

from clawloop.processes.bootstrap import prepare
from db.database import Database
from db.invariants import violations
from tests.contract.conftest import TEST_LIMIT
from tests.e2e.gateway import running_gateway
from tests.fakes.engine import fake_engine
from tests.verbs import clawloop_process


@contextmanager
def working(folder: Path, settings: dict[str, str], *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "clawloop.cli.main", "worker", *arguments]
    with (folder / f"{arguments[0]}.log").open("wb") as log:
        worker = subprocess.Popen(command, env=dict(os.environ) | settings, stdout=log, stderr=log)
        try:
            yield
        finally:
            worker.terminate()
            worker.wait(30)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.postgres
async def test_rollouts_of_a_model_that_never_answers_right_pause_themselves(
    postgres_url: str, temporal_address: str, tmp_path: Path
) -> None:
    settings = {
        "DATABASE_URL": postgres_url,
        "TEMPORAL_ADDRESS": temporal_address,
        "CLAWLOOP_DATA": str(tmp_path / "data"),
    }
    async with fake_engine() as engine:
        keys = await prepare(postgres_url, "tiny", [], [engine.url], {})
        async with running_gateway(postgres_url, keys, tmp_path / "data") as gateway:
            with ExitStack() as stack:
                stack.enter_context(working(tmp_path, settings, "orchestrator"))
                stack.enter_context(working(tmp_path, settings, "environment", "--gateway", gateway.url))
                start = ["rollouts", "start", "--environment", "tool-call", "--size", "2", "--groups", "1"]
                done = await asyncio.to_thread(clawloop_process, *start, "--barren", "1", "--json", **settings)
                assert done.returncode == 0, done.stderr
                assert json.loads(done.stdout)["state"] == "running"
                rows = await asyncio.to_thread(wait_for_pause, postgres_url)
        shown = await asyncio.to_thread(clawloop_process, "episode", "list", "--json", **settings)
    assert rows[0]["paused_reason"].startswith("1 groups in a row gave no sample")
    episodes = json.loads(shown.stdout)["episodes"]
    finished = [episode for episode in episodes if episode["task"] == "train-0"]
    assert [(e["state"], e["ending"], e["reward"], e["turns"], e["trained"]) for e in finished] == [
        ("scored", "completed", 0.0, 1, 0)
    ] * 2
    database = Database(postgres_url, TEST_LIMIT)
    assert await violations(database) == []
    await database.close()


def wait_for_pause(url: str) -> list[dict[str, str]]:
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        query = """SELECT paused_reason FROM rollouts WHERE paused_reason IS NOT NULL
            AND NOT EXISTS (SELECT FROM rollout_groups WHERE state = 'open')"""
        deadline = time.monotonic() + 240  # the sweep may have to start the workflow, within a minute
        while not (rows := connection.execute(query).fetchall()):
            assert time.monotonic() < deadline
            connection.execute("SELECT pg_sleep(0.2)")
        return rows
