"""A demo of episodes with all parts real but the engine, which answers nonsense: it practises and reports."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clawloop.app.cli.up import prepare_deployment
from clawloop.app.demo import practice
from clawloop.app.demo.practice import HeldOut, PracticeOptions, none_completed, practise, while_served
from clawloop.app.demo.run import DemoSetup
from clawloop.app.demo.toys import toy_of
from clawloop.app.local import up
from clawloop.app.local.plan import UpOptions
from clawloop.app.local.supervision.supervisor import PartState, PartStatus
from tests.fakes.engine import fake_engine
from tests.records import episode_view


class Lines:
    """Satisfies `Board`."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def changed(self, status: PartStatus) -> None:
        assert status.state is not PartState.FAILED, status


async def test_a_version_that_engines_unload_is_not_waited_for() -> None:
    served, cancelled = [True, True, False], asyncio.Event()

    async def never_measured() -> HeldOut:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    async def is_served() -> bool:
        return served.pop(0)

    assert await while_served(never_measured(), is_served, 0.01) is None
    assert cancelled.is_set()
    assert served == []


async def test_a_served_version_is_measured() -> None:
    async def measured() -> HeldOut:
        await asyncio.sleep(0.05)
        return HeldOut(3, 4, 1)

    async def is_served() -> bool:
        return True

    assert await while_served(measured(), is_served, 0.01) == HeldOut(3, 4, 1)


@pytest.mark.parametrize(
    ("endings", "told"),
    [
        (
            {"agent_error": 30, "truncated_time": 2},
            "none of the first 32 episodes was completed, most ended as agent_error",
        ),
        ({"agent_error": 31}, None),
        ({"agent_error": 90, "completed": 1}, None),
        ({None: 40}, None),
    ],
)
def test_a_run_without_one_completed_episode_says_so(endings: dict[str | None, int], told: str | None) -> None:
    """An engine that refused every episode's request once kept a demo going for its forty minutes, without a word."""
    found = none_completed(
        [episode_view(ending=ending, reward=None) for ending, count in endings.items() for _ in range(count)]
    )
    assert found is None if told is None else str(found).startswith(told)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_a_model_that_learns_nothing_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HELD_OUT_TASKS", 3), ("GROUP_SIZE", 2), ("GROUPS_IN_FLIGHT", 1)):
        monkeypatch.setattr(practice, name, value)
    board = Lines()
    async with fake_engine() as engine:

        async def run_up(options: UpOptions, *given: Any, **named: Any) -> None:
            await up.run(replace(options, engines=(engine.url,)), *given, **named)

        monkeypatch.setattr(practice, "run_up", run_up)
        options = PracticeOptions(
            toy=toy_of("terminal"),
            seeds=[5],
            versions=1,
            minutes=0.2,
            setup=DemoSetup(tmp_path / "data", tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}),
        )
        (report,) = await practise(options, board, prepare_deployment)
    assert (report.success_before, report.seconds_to_goal, report.versions) == (0.0, None, 0)
    assert report.stopped == "0.2 minutes are over"
    assert (report.measured[0].attempts, report.measured[0].unknown) == (3, 0)
    assert report.groups_constant == report.groups
    assert set(report.endings) <= {"completed"}
    assert json.loads((tmp_path / "demo-terminal.json").read_text())["runs"][0]["seed"] == 5
    assert any("version   0: success   0% of 3 held-out tasks" in line for line in board.said)
    assert not (tmp_path / "data" / "demo").exists()
    # It once said that its data stays, of a folder that was gone.
    assert board.said[-1] == "stopped"
