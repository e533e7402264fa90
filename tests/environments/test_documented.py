"""The guide to an environment of one's own in docs/environments.md, followed to the letter."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from clawloop.app.processes.bootstrap import prepare
from tests.e2e.gateway import running_gateway
from tests.e2e.workers import running_workers
from tests.fakes.engine import fake_engine
from tests.fakes.replies import Reply
from tests.verbs import clawloop_process

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"
# Programs start and import on a machine that may be busy.
SECONDS = 240


def blocks() -> list[str]:
    """The commands of the guide, block by block."""
    [section] = re.findall(r"^## Your own in ten minutes\n(.+?)^## ", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    found = re.findall(r"```sh\n(.+?)```", section, re.DOTALL)
    assert len(found) == 5
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the users of sandboxes can read; pytest's own are its user's alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def variables(**more: str) -> dict[str, str]:
    return dict(os.environ) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | more


def follow(block: str, folder: Path, **more: str) -> str:
    """What the commands print."""
    command = ["bash", "-euc", f"umask 022\n{block}"]
    done = subprocess.run(command, cwd=folder, env=variables(**more), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_its_tasks_are_usable(folder: Path) -> None:
    tasks, check, *_ = blocks()
    follow(tasks, folder)
    shown = follow(check, folder)
    assert len(re.findall(r"shout-\w+ .*\byes\b.* 1, 0, 0", shown)) == 3, shown


class RightEverySecondTime:
    """Answers for the engine."""

    def __init__(self) -> None:
        self._asked = 0

    def __call__(self, body: dict[str, Any]) -> Reply:
        [message] = body["messages"]
        word = re.search(r"the word '(\w+)'", message["content"])
        assert word is not None
        self._asked += 1
        return Reply(f"echo {word[1] if self._asked % 2 else word[1].upper()} > shout.txt")


@contextmanager
def running(block: str, folder: Path, log: Path, **more: str) -> Iterator[None]:
    """The command of a block, until the end of the block here."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-euc", f"exec {block}"], cwd=folder, env=variables(**more), stdout=output, stderr=output
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(SECONDS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_its_agent_plays_and_the_policy_gets_samples(
    empty_postgres_url: str, temporal_address: str, folder: Path, tmp_path: Path
) -> None:
    tasks, _, agent, worker, start = blocks()
    for block in (tasks, agent):
        await asyncio.to_thread(follow, block, folder)
    data = tmp_path / "data"
    settings = {
        "DATABASE_URL": empty_postgres_url,
        "TEMPORAL_ADDRESS": temporal_address,
        "CLAWLOOP_DATA": str(data),
    }
    async with fake_engine() as engine:
        engine.script = RightEverySecondTime()
        keys = await prepare(empty_postgres_url, "tiny", [], [engine.url], {})
        async with running_gateway(empty_postgres_url, keys, data) as gateway:
            # The only word that is not the guide's: its gateway has the port of `clawloop up`.
            command = f"{worker.strip()} --gateway {gateway.url}"
            orchestrator = running_workers(tmp_path, empty_postgres_url, temporal_address, ["orchestrator"])
            async with orchestrator:
                with running(command, folder, tmp_path / "environment.log", **settings):
                    await asyncio.to_thread(follow, start, folder, **settings)
                    await asyncio.to_thread(_wait_for_samples, empty_postgres_url, tmp_path / "environment.log")
                    done = await asyncio.to_thread(clawloop_process, "rollouts", "pause", "enough", **settings)
                    assert done.returncode == 0, done.stderr
                    shown = await asyncio.to_thread(clawloop_process, "episode", "list", "--json", **settings)
    episodes = [one for one in json.loads(shown.stdout)["episodes"] if one["state"] == "scored"]
    assert {(one["environment"], one["ending"], one["turns"]) for one in episodes} == {("tasks", "completed", 1)}
    assert {one["reward"] for one in episodes} == {0.0, 1.0}


def _wait_for_samples(url: str, log: Path) -> None:
    query = """SELECT count(*) FROM samples s JOIN turns t ON t.id = s.turn_id JOIN episodes e ON e.id = t.episode_id
        WHERE sign(s.reward) = sign(e.reward - 0.5)"""
    deadline = time.monotonic() + SECONDS
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            row = connection.execute(query).fetchone()
            assert row is not None
            if row[0] >= 4:
                return
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
