"""Rollouts from the command line to the settled group: every process real, but the engine, which answers nonsense."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from clawloop.app.processes.bootstrap import prepare
from clawloop.environments.browser.chromium import chromium_folder
from clawloop.environments.browser.environment import generated_task
from clawloop.environments.task import Split
from db.database import Database
from db.invariants import violations
from tests.contract.conftest import TEST_LIMIT
from tests.e2e.gateway import running_gateway
from tests.environments.browser_agent import next_message
from tests.fakes.engine import fake_engine
from tests.fakes.replies import Reply
from tests.verbs import clawloop_process


@contextmanager
def working(
    folder: Path, settings: dict[str, str], *arguments: str, program: str = "clawloop.app.cli.main"
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", program, "worker", *arguments]
    with (folder / f"{arguments[0]}.log").open("ab") as log:
        worker = subprocess.Popen(command, env=dict(os.environ) | settings, stdout=log, stderr=log)
        try:
            yield worker
        finally:
            worker.terminate()
            worker.wait(60)


@pytest.mark.long
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


def half_of_them_solve() -> Callable[[dict[str, Any]], Reply]:
    """Of the episodes of each task the first gives up, the second solves it, and so on, without a model."""
    tasks = [generated_task(Split.TRAIN, number) for number in range(14)]
    begun: dict[str, int] = {}

    def answer(body: dict[str, Any]) -> Reply:
        messages = body["messages"]
        [task] = [task for task in tasks if task.instruction in messages[0]["content"]]
        if len(messages) == 1:
            begun[task.instruction] = begun.get(task.instruction, 0) + 1
            if begun[task.instruction] % 2:
                return Reply("I cannot do this.")
        function = next_message(task.solution, messages)["tool_calls"][0]["function"]
        return Reply(calls=[(function["name"], json.loads(function["arguments"]))])

    return answer


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_group_of_episodes_in_browsers_makes_samples(
    empty_postgres_url: str, temporal_address: str, tmp_path: Path
) -> None:
    await asyncio.to_thread(chromium_folder)
    settings = {
        "DATABASE_URL": empty_postgres_url,
        "TEMPORAL_ADDRESS": temporal_address,
        "CLAWLOOP_DATA": str(tmp_path / "data"),
    }
    async with fake_engine() as engine:
        engine.script = half_of_them_solve()
        keys = await prepare(empty_postgres_url, "tiny", [], [engine.url], {})
        async with running_gateway(empty_postgres_url, keys, tmp_path / "data") as gateway:
            with ExitStack() as stack:
                stack.enter_context(working(tmp_path, settings, "orchestrator"))
                browsers = ["--environment", "browser", "--episodes", "2", "--gateway", gateway.url]
                stack.enter_context(working(tmp_path, settings, "environment", *browsers))
                start = ["rollouts", "start", "--environment", "browser", "--size", "2", "--groups", "1"]
                done = await asyncio.to_thread(clawloop_process, *start, **settings)
                assert done.returncode == 0, done.stderr
                rewards = await asyncio.to_thread(settled, empty_postgres_url, tmp_path)
                await asyncio.to_thread(clawloop_process, "rollouts", "pause", "enough", **settings)
                await asyncio.to_thread(wait_for_pause, empty_postgres_url)
    # Of the same task: what solved it is praised, what gave up is blamed, at the very first attempt of each.
    episodes = [(row["state"], row["ending"], row["attempt"], row["reward"]) for row in rewards]
    assert episodes == [("scored", "completed", 1, 0.0), ("scored", "completed", 1, 1.0)]
    assert [(row["turns"], row["samples"]) for row in rewards] == [(1, [-1.0]), (2, [1.0, 1.0])]
    database = Database(empty_postgres_url, TEST_LIMIT)
    assert await violations(database) == []
    await database.close()


def settled(url: str, logs: Path) -> list[dict[str, Any]]:
    """The episodes of the first group, by their reward, once it is settled."""
    query = """SELECT e.state, e.ending, e.attempt, e.reward, count(t.id) AS turns,
            array_agg(round(s.reward::numeric, 2)::float) AS samples
        FROM episodes e JOIN rollout_groups g ON g.id = e.group_id JOIN turns t ON t.episode_id = e.id
            LEFT JOIN samples s ON s.turn_id = t.id
        WHERE g.task = 'train-0' AND g.state = 'settled' GROUP BY e.id ORDER BY e.reward"""
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        deadline = time.monotonic() + 480
        while not (rows := connection.execute(query).fetchall()):
            assert time.monotonic() < deadline, (logs / "environment.log").read_text()[-3000:]
            connection.execute("SELECT pg_sleep(0.2)")
        return rows


def wait_for_pause(url: str) -> list[dict[str, str]]:
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        query = """SELECT paused_reason FROM rollouts WHERE paused_reason IS NOT NULL
            AND NOT EXISTS (SELECT FROM rollout_groups WHERE state = 'open')"""
        deadline = time.monotonic() + 240  # the sweep may have to start the workflow, within a minute
        while not (rows := connection.execute(query).fetchall()):
            assert time.monotonic() < deadline
            connection.execute("SELECT pg_sleep(0.2)")
        return rows
