"""1,000 schedules by seed: interleavings, crashes between any two calls, lost and doubled deliveries; all on fakes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from activities.judging.judge_turn import JudgeTurn
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import StoredTurn
from tests.fakes.gate_store import FakeGateStore
from tests.fakes.judgement_store import FakeJudgementStore
from tests.fakes.step_store import FakeStepStore
from tests.fakes.turn_store import FakeTurnStore
from tests.simulation.parts import LoadedFiles
from tests.simulation.schedule import Schedule, VirtualTimeLoop
from tests.simulation.system import System

Result = TypeVar("Result")

SCHEDULES, GROUPS = 1000, 10


def simulate(seed: int) -> tuple[Schedule, System, list[str]]:
    async def run() -> tuple[Schedule, System, list[str]]:
        schedule = Schedule(seed, crashes=0.03, timeouts=0.1)
        system = System(schedule)
        system.start(sessions=2, turns=4)
        await schedule.run()
        return schedule, system, await system.problems()

    return run_virtually(run())


def run_virtually(work: Coroutine[object, object, Result]) -> Result:
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):  # of a schedule that failed
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """What is logged is expected, and formatting it would take half of the time."""
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("group", range(GROUPS))
def test_nothing_is_lost_or_done_twice_whatever_is_killed_when(group: int) -> None:
    killed = doubled = trained = 0
    disturbed: Counter[str] = Counter()
    for seed in range(group * SCHEDULES // GROUPS, (group + 1) * SCHEDULES // GROUPS):
        schedule, system, problems = simulate(seed)
        assert problems == [], f"seed {seed}"
        killed, doubled = killed + schedule.killed, doubled + schedule.doubled
        trained += len(system.ledger.steps)
        disturbed += system.disturbed
    # The schedules do what they are for.
    assert min(killed, doubled, trained) >= SCHEDULES // GROUPS
    assert disturbed.keys() == {"restart", "roll back"}


def _lose_the_spool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(System, "_from_spool", lambda *_: None)


def _set_the_first_batch(patch: pytest.MonkeyPatch, state: SampleState) -> None:
    """Its samples have this state once its version is accepted."""
    accept = FakeGateStore.accept

    async def accepting(store: FakeGateStore, policy: str, n: int) -> Any:
        accepted = await accept(store, policy, n)
        if n == 1:
            for sample in store.ledger.steps[policy, n].samples:
                store.ledger.samples[sample].state = state
        return accepted

    patch.setattr(FakeGateStore, "accept", accepting)


def _train_the_first_batch_twice(patch: pytest.MonkeyPatch) -> None:
    _set_the_first_batch(patch, SampleState.FRESH)


def _leave_the_first_batch_claimed(patch: pytest.MonkeyPatch) -> None:
    _set_the_first_batch(patch, SampleState.CLAIMED)


def _forget_votes(patch: pytest.MonkeyPatch) -> None:
    opened = FakeJudgementStore.open

    async def opening(store: FakeJudgementStore, *arguments: Any, **named: Any) -> Any:
        return replace(await opened(store, *arguments, **named), votes={})

    patch.setattr(FakeJudgementStore, "open", opening)


def _keep_old_files(patch: pytest.MonkeyPatch) -> None:
    load = LoadedFiles.load

    async def loading(engine: LoadedFiles, version: Any, name: str) -> None:
        await load(engine, version, name)
        engine.paths[name] = "another"

    patch.setattr(LoadedFiles, "load", loading)


def _lose_candidates(patch: pytest.MonkeyPatch) -> None:
    async def looking(store: FakeStepStore, policy: str, n: int) -> None:
        return

    patch.setattr(FakeStepStore, "candidate", looking)


def _judge_nothing(patch: pytest.MonkeyPatch) -> None:
    async def judging(system: System, session: str, request: JudgeTurn) -> None:
        return

    patch.setattr(System, "_judge", judging)


def _forget_parents(patch: pytest.MonkeyPatch) -> None:
    everything = FakeTurnStore.all

    async def forgetting(store: FakeTurnStore) -> list[StoredTurn]:
        return [replace(turn, parent_turn_id=None) for turn in await everything(store)]

    patch.setattr(FakeTurnStore, "all", forgetting)


def _never_close(patch: pytest.MonkeyPatch) -> None:
    async def closing(system: System, session: str) -> None:
        return

    patch.setattr(System, "_close", closing)


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (_lose_the_spool, "is lost"),
        (_train_the_first_batch_twice, "times on the lineage"),
        (_forget_votes, "answers were asked for though"),
        (_keep_old_files, "which no version is"),
        (_never_close, "waits, though its session is closed"),
        (_judge_nothing, "is unjudged, though another follows it"),
        (_forget_parents, "has another parent than the turn before"),
        (_lose_candidates, "has ended for its workflow, and is candidate"),
        (_leave_the_first_batch_claimed, "is claimed, and open steps have it: False"),
    ],
)
def test_the_checks_find_what_is_broken(
    break_it: Callable[[pytest.MonkeyPatch], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert any(found in problem for seed in range(SCHEDULES) for problem in simulate(seed)[2])
