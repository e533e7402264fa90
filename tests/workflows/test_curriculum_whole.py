"""A curriculum from the command line to the tasks it draws: every process and sandbox real, but the engine, whose skill
depends on what it is asked."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from clawloop.app.processes.bootstrap import prepare
from db.database import Database
from db.invariants import violations
from tests.contract.conftest import TEST_LIMIT
from tests.e2e.gateway import running_gateway
from tests.fakes.engine import fake_engine
from tests.fakes.replies import Reply
from tests.verbs import clawloop_process
from tests.workflows.test_rollouts_whole import working

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
