"""Episodes through the whole system, whose worker is killed while they run: every process, sandbox and service is real,
but the engine, which can add."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from psycopg.rows import dict_row
from temporalio.client import Client

from clawloop.app.processes.bootstrap import prepare
from clawloop.sandboxes.folders import BoxFolders
from db.database import Database
from db.invariants import violations
from tests.contract.conftest import TEST_LIMIT
from tests.e2e.gateway import running_gateway
from tests.fakes.engine import FakeEngine, fake_engine
from tests.fakes.replies import Reply
from tests.sandboxes.test_bubblewrap import open_folder
from tests.verbs import clawloop_process
from tests.workflows.test_rollouts_whole import working

__all__ = ["open_folder"]

# It takes half a minute; more on a machine that is busy with other tests.
SECONDS = 240
OPERATIONS = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
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
    deadline = time.monotonic() + SECONDS
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
@pytest.mark.timeout(3 * SECONDS)
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
