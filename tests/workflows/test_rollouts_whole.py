"""Rollouts from the command line to the settled group: every process real but the engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.rows import dict_row
from temporalio.client import Client

from clawloop.app.processes.bootstrap import prepare
from clawloop.environments.browser.chromium import chromium_folder
from clawloop.environments.browser.environment import generated_task
from clawloop.environments.task import Split
from clawloop.sandboxes.folders import BoxFolders
from db.database import Database
from db.invariants import violations
from tests.contract.conftest import TEST_LIMIT
from tests.e2e.gateway import running_gateway
from tests.environments.browser_agent import next_message
from tests.fakes.engine import FakeEngine, fake_engine
from tests.fakes.replies import Reply
from tests.sandboxes.test_bubblewrap import open_folder
from tests.verbs import clawloop_process

__all__ = ["open_folder"]


# Rollouts from the command line to the settled group: every process real, but the engine, which answers nonsense.


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


# A curriculum from the command line to the tasks it draws: every process and sandbox real, but the engine, whose skill

# Some two hundred episodes, in sandboxes, on a machine that may be busy.
SECONDS = 1200
OPERATIONS = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
ALL, HALF, NONE = (True,), (True, False), (False,)
# Sums are too easy, and less so with more digits; products fail, and with fewer digits as well. All attempts at a
# question have the same reward, so no group makes a sample: nobody trains here, and rollouts would wait for a step.
SKILL = {("plus", 2): ALL, ("times", 2): NONE, ("times", 1): NONE}


class Solver:
    """Answers for the engine: by kind and digits, each new question with the next of the answers in `SKILL`."""

    def __init__(self) -> None:
        self._right: dict[str, bool] = {}
        self._questions: dict[tuple[str, int], int] = {}

    def __call__(self, body: dict[str, Any]) -> Reply:
        found = re.search(r"What is (\d+) (plus|minus|times) (\d+)\?", body["messages"][0]["content"])
        assert found is not None
        left, kind, right = found.groups()
        if found[0] not in self._right:
            asked = (kind, len(left))
            number = self._questions[asked] = self._questions.get(asked, -1) + 1
            answers = SKILL.get(asked, HALF)
            self._right[found[0]] = answers[number % len(answers)]
        answer = OPERATIONS[kind](int(left), int(right))
        return Reply(str(answer if self._right[found[0]] else answer + 1))


def wait_for_decisions(url: str, logs: Path) -> list[str]:
    """Why the curriculum changed, once a change was kept and one undone; in order."""
    query = "SELECT detail FROM events WHERE kind = 'curriculum_moved' ORDER BY id"
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        deadline = time.monotonic() + SECONDS
        while True:
            moved = [f"{row['detail']['task_kind']}: {row['detail']['reason']}" for row in connection.execute(query)]
            if all(any(word in line for line in moved) for word in ("kept", "undone")):
                return moved
            assert time.monotonic() < deadline, (moved, (logs / "environment.log").read_text()[-3000:])
            connection.execute("SELECT pg_sleep(0.5)")


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 600)
async def test_success_moves_the_tasks_that_come_and_only_what_helped_is_kept(
    empty_postgres_url: str, temporal_address: str, tmp_path: Path
) -> None:
    settings = {
        "DATABASE_URL": empty_postgres_url,
        "TEMPORAL_ADDRESS": temporal_address,
        "CLAWLOOP_DATA": str(tmp_path / "data"),
    }
    async with fake_engine() as engine:
        engine.script = Solver()
        keys = await prepare(empty_postgres_url, "tiny", [], [engine.url], {})
        async with running_gateway(empty_postgres_url, keys, tmp_path / "data") as gateway:
            with ExitStack() as stack:
                stack.enter_context(working(tmp_path, settings, "orchestrator"))
                stack.enter_context(working(tmp_path, settings, "environment", "--gateway", gateway.url))
                start = ["rollouts", "start", "--environment", "tool-call", "--size", "8", "--groups", "3"]
                done = await asyncio.to_thread(
                    clawloop_process, *start, "--barren", "1000", "--curriculum", "--json", **settings
                )
                assert done.returncode == 0, done.stderr
                assert {(kind["level"], kind["weight"]) for kind in json.loads(done.stdout)["curriculum"]} == {(2, 1.0)}
                moved = await asyncio.to_thread(wait_for_decisions, empty_postgres_url, tmp_path)
                shown = await asyncio.to_thread(clawloop_process, "rollouts", "status", "--json", **settings)
                await asyncio.to_thread(clawloop_process, "rollouts", "pause", "enough", **settings)
    assert {
        "plus: success 1.00: level 3 instead of 2, on trial",
        "times: success 0.00: level 1 instead of 2, on trial",
    } < {*moved}
    kinds = {kind["kind"]: kind for kind in json.loads(shown.stdout)["curriculum"]}
    assert (kinds["plus"]["level"], kinds["plus"]["weight"], kinds["plus"]["trial_of"]) == (3, 1.0, None)
    assert re.fullmatch(r"success 0\.\d\d at level 3, 1\.00 at 2: kept", kinds["plus"]["why"])
    assert (kinds["times"]["level"], kinds["times"]["weight"], kinds["times"]["needed"]) == (2, 0.5, 64)
    assert kinds["times"]["why"] == "success 0.00 at level 1, 0.00 at 2: undone, not as meant"
    assert (kinds["minus"]["level"], kinds["minus"]["weight"], kinds["minus"]["why"]) == (2, 1.0, "")
    _check_the_questions(empty_postgres_url)
    database = Database(empty_postgres_url, TEST_LIMIT)
    assert await violations(database) == []
    await database.close()


def _check_the_questions(url: str) -> None:
    """Levels are what agents were asked, not only what tasks are called."""
    query = """SELECT DISTINCT g.kind, g.level, t.messages_added::text AS messages FROM turns t
        JOIN episodes e ON e.id = t.episode_id JOIN rollout_groups g ON g.id = e.group_id"""
    with psycopg.connect(url, row_factory=dict_row) as connection:
        asked = connection.execute(query).fetchall()
    levels = {(row["kind"], row["level"]) for row in asked}
    assert {("plus", 2), ("plus", 3), ("minus", 2), ("times", 2), ("times", 1)} <= levels
    for row in asked:
        found = re.search(r"What is (\d+) (\w+) (\d+)\?", row["messages"])
        assert found is not None
        assert (found[2], len(found[1]), len(found[3])) == (row["kind"], row["level"], row["level"])


# Episodes through the whole system, whose worker is killed while they run: every process, sandbox and service is real,

# It takes half a minute; more on a machine that is busy with other tests.
KILLED_SECONDS = 240
EPISODES = """SELECT e.place, e.attempt, e.state, e.ending, e.reward, e.reason,
        (SELECT count(*) FROM turns t WHERE t.episode_id = e.id) AS turns
    FROM episodes e ORDER BY e.place, e.attempt"""
SETTLED = """SELECT count(*) > 0 AND bool_and(state <> 'open') AND NOT EXISTS (
        SELECT FROM episodes e WHERE e.state = 'scored' AND NOT EXISTS (SELECT FROM turns t WHERE t.episode_id = e.id))
    FROM rollout_groups"""


def solved(body: dict[str, Any]) -> Reply:
    found = re.search(r"What is (\d+) (plus|minus|times) (\d+)\?", body["messages"][0]["content"])
    assert found is not None
    return Reply(str(OPERATIONS[found[2]](int(found[1]), int(found[3]))))


async def until(true: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + KILLED_SECONDS
    while not await asyncio.to_thread(true):
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        await asyncio.sleep(0.1)


def processes_in(folder: Path) -> list[list[str]]:
    """Commands that name the folder: sandboxes are told where theirs is."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if any(str(folder) in word for word in command)]


async def play_with_a_kill(engine: FakeEngine, gateway: str, folder: Path, settings: dict[str, str]) -> None:
    """A group of two episodes, whose worker is killed when both agents wait for the engine, and started again."""
    engine.hold = asyncio.Event()
    worker = "environment", "--environment", "tool-call", "--gateway", gateway
    log = folder / "environment.log"
    with ExitStack() as stack:
        orchestrator = working(folder, settings, "orchestrator", program="tests.workflows.quick_orchestrator")
        stack.enter_context(orchestrator)
        with working(folder, settings, *worker) as killed:
            start = "rollouts", "start", "--environment", "tool-call", "--size", "2", "--groups", "1"
            done = await asyncio.to_thread(clawloop_process, *start, **settings)
            assert done.returncode == 0, done.stderr  # where Temporal is slow, the sweep tells the workflow
            await until(lambda: len(engine.requests) >= 2, log)
            paused = await asyncio.to_thread(clawloop_process, "rollouts", "pause", "enough", **settings)
            assert paused.returncode == 0, paused.stderr
            assert len(processes_in(Path(settings["TMPDIR"]))) >= 2
            killed.kill()
            killed.wait()
            assert list(Path(settings["TMPDIR"]).glob("clawloop-*"))
        stack.enter_context(working(folder, settings, *worker))
        engine.hold.set()
        with psycopg.connect(settings["DATABASE_URL"], autocommit=True) as connection:
            # Where PostgreSQL is slow, a turn goes by the gateway's disk and is stored after its group is settled.
            await until(lambda: connection.execute(SETTLED).fetchone() == (True,), log)


@pytest.mark.long
@pytest.mark.timeout(3 * KILLED_SECONDS)
async def test_a_killed_worker_costs_its_episodes_an_attempt_and_nothing_else(
    client: Client, postgres_url: str, temporal_address: str, tmp_path: Path, open_folder: Path
) -> None:
    settings = {
        "DATABASE_URL": postgres_url,
        "TEMPORAL_ADDRESS": temporal_address,
        "CLAWLOOP_DATA": str(tmp_path / "data"),
        "TMPDIR": str(open_folder),
    }
    async with fake_engine() as engine:
        engine.script = solved
        keys = await prepare(postgres_url, "tiny", [], [engine.url], {})
        async with running_gateway(postgres_url, keys, tmp_path / "data") as gateway:
            await play_with_a_kill(engine, gateway.url, tmp_path, settings)
    with psycopg.connect(postgres_url, row_factory=dict_row) as connection:
        episodes = connection.execute(EPISODES).fetchall()
        groups = connection.execute("SELECT size, scored, reason FROM rollout_groups").fetchall()
    finished = [one for one in episodes if one["state"] != "abandoned"]
    assert [(one["place"], one["state"], one["ending"], one["reward"], one["turns"]) for one in finished] == [
        (0, "scored", "completed", 1.0, 1),
        (1, "scored", "completed", 1.0, 1),
    ]
    first = [(one["place"], one["state"], one["reason"], one["reward"]) for one in episodes if one["attempt"] == 1]
    assert first == [(place, "abandoned", "its worker fell silent", None) for place in range(2)]
    assert [(group["size"], group["scored"]) for group in groups] == [(2, 2)]
    await until(lambda: not processes_in(open_folder), tmp_path / "environment.log")
    BoxFolders(open_folder).sweep()
    assert list(open_folder.glob("clawloop-*")) == []
    database = Database(postgres_url, TEST_LIMIT)
    assert await violations(database) == []
    await database.close()
