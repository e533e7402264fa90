"""A run of a demo of episodes: versions that newer ones followed too quickly are measured once it is over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from clawloop.app.demo import practice
from clawloop.app.demo.admin_client import AcceptedVersion
from clawloop.app.demo.practice import HeldOut, Run
from clawloop.app.demo.practice_report import PracticeReport
from clawloop.app.local.supervision.supervisor import PartStatus
from clawloop.core.contracts.answers import TrainingStatus
from clawloop.core.contracts.episodes import EpisodeView, RolloutsState, RolloutsView
from clawloop.core.contracts.training import TrainingState
from clawloop.core.errors import SetupError
from clawloop.core.ids import version_name
from tests.records import episode_view


class Loop:
    """A policy whose version goes up by two whenever one is measured; stands in for the admin API and for engines.

    Args:
        unloadable: versions that no engine loads.
    """

    def __init__(self, unloadable: Sequence[int] = ()) -> None:
        self.began = datetime.now(UTC)
        self.version = 0
        self.running = False
        self.wanted: list[int] = []
        self.unloadable = unloadable
        self.said: list[str] = []

    async def training_status(self, policy: str) -> TrainingStatus:
        return TrainingStatus(
            policy=policy,
            state=TrainingState.TRAINING,
            reason="",
            ready=0,
            needed=1,
            judging=0,
            step=self.version + 1,
            version=self.version,
            head=self.version,
            pinned=None,
        )

    async def accepted_versions(self, policy: str) -> list[AcceptedVersion]:
        # Version 2 was rejected. Each takes a minute.
        numbers = [n for n in range(1, self.version + 1) if n != 2]
        return [AcceptedVersion(n, self.began + timedelta(minutes=n, seconds=1)) for n in numbers]

    async def served_models(self) -> set[str]:
        loaded = {0, self.version, *self.wanted} - set(self.unloadable)
        return {version_name("p", n, "toy") for n in loaded}

    async def want_for(self, policy: str, versions: Sequence[int], how_long: timedelta) -> None:
        self.wanted = list(versions)

    async def start_rollouts(self, policy: str, environment: str, *, size: int, groups: int, barren: int) -> None:
        self.running = True
        self.version = 1

    async def pause_rollouts(self, policy: str, reason: str) -> None:
        self.running = False

    async def rollouts(self, policy: str) -> RolloutsView:
        return RolloutsView(
            policy=policy,
            state=RolloutsState.RUNNING if self.running else RolloutsState.PAUSED,
            reason="",
            plan=None,
            in_flight=0,
            settled=0,
            dropped=0,
            recent_reward=None,
        )

    async def groups(self, policy: str) -> list[Any]:
        return []

    async def episodes(self, policy: str) -> list[EpisodeView]:
        """Four a minute."""
        ends = [self.began + timedelta(seconds=15 * n) for n in range(1, 4 * self.version + 1)]
        return [episode_view(ended_at=at) for at in ends]

    async def measure(self, runner: object, environment: str, tasks: int, **asked: Any) -> HeldOut:
        """Right are as many of ten as the version says."""
        right = next(n for n in range(10) if version_name("p", n, "toy") == asked["model"])
        if self.running:
            self.version += 2
        return HeldOut(right, 10, 0)

    def say(self, line: str) -> None:
        self.said.append(line)

    def changed(self, status: PartStatus) -> None:
        raise AssertionError(status)


def run_of(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(practice, "measure_held_out", loop.measure)
    monkeypatch.setattr(practice, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(practice, "_LOAD_SECONDS", 0.05)
    return Run(
        environment="toy",
        policy="p",
        seed=7,
        admin=cast(Any, loop),
        loading=cast(Any, loop),
        runner=cast(Any, None),
        key="key",
        base_model="toy",
        board=loop,
        logs=Path("logs"),
    )


async def report_of(run: Run) -> PracticeReport:
    return await run.measure_the_rest(await run.practise(0.0, 7, 60.0))


async def test_each_accepted_version_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    report = await report_of(run_of(loop, monkeypatch))
    # 1, 3 and 5 while newer ones came; 2 was rejected; the others once the run was over.
    assert [row.version for row in report.measured] == [0, 1, 3, 4, 5, 6, 7]
    assert [row.version for row in report.measured if not row.after_run] == [0, 1, 3, 5]
    assert [row.success for row in report.measured] == [0.0, 0.1, 0.3, 0.4, 0.5, 0.6, 0.7]
    # When each was made, however late it was measured.
    assert [round(row.seconds / 60) for row in report.measured] == [0, 1, 3, 4, 5, 6, 7]
    assert [row.episodes for row in report.measured] == [0, 4, 12, 16, 20, 24, 28]
    assert report.stopped is None


async def test_a_version_that_no_engine_loads_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(unloadable=[4])
    report = await report_of(run_of(loop, monkeypatch))
    assert [row.version for row in report.measured] == [0, 1, 3, 5, 6, 7]
    assert "seed 7, version   4: no engine has it, so it is not measured" in loop.said


async def test_a_run_whose_base_model_no_engine_serves_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(unloadable=[0])
    with pytest.raises(SetupError, match="no engine served toy"):
        await report_of(run_of(loop, monkeypatch))
    assert not loop.running


async def test_what_was_measured_during_a_run_is_reported_before_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(Loop(), monkeypatch)
    report = await run.practise(0.0, 7, 60.0)
    assert [row.version for row in report.measured] == [0, 1, 3, 5]
    monkeypatch.setattr(practice, "_REST_SECONDS", -1.0)
    assert [row.version for row in (await run.measure_the_rest(report)).measured] == [0, 1, 3, 5]
