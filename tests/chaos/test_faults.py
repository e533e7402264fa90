"""Faults in the whole system, one after the other, while sessions chat: nothing is lost or done twice.

`make test` has those of services and connections, and crashes on a chat's way. `make test-long` has each crash point of
our code as well: a step that begins anew after each crash of a trainer takes minutes. Requests of any shape come
meanwhile.

All processes are real but the engine, which has no model. `make chaos` has a real one, and chooses faults by seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from clawloop.app.local.tiny_model import ensure_tiny_model
from clawloop.core.crash_points import CrashPoint
from clawloop.core.judging.records import HINTS, VOTES
from tests.api.test_any_shape import PROPER
from tests.chaos.asked_again import stored_answers
from tests.chaos.chatters import Chatters
from tests.chaos.faults import CRASH, WHILE_PRACTISING
from tests.chaos.fuzzer import Fuzzer
from tests.chaos.judged import judged_turns
from tests.chaos.run import problems_at_the_end, run_these
from tests.chaos.stack import WITH_HINTS, Stack, running_stack
from tests.chaos.stand_in_engine import stand_in_engine

pytestmark = pytest.mark.slow

# A crash point is a `kill -9` of the process that passes it. Training then waits until Temporal misses a heartbeat. The
# faults in between use that time, and one step passes all points of its way.
ALL_FAULTS = (
    "cut gateway",
    f"crash {CrashPoint.MID_STREAM}",
    "cut postgres",
    f"crash {CrashPoint.REPLY_NOT_STORED}",
    "refuse engine",
    "double temporal",
    f"crash {CrashPoint.CLAIMED}",
    "stop combined-worker",
    "cut engine",
    "postgres backend killed",
    f"crash {CrashPoint.STEP_NOT_SAVED}",
    f"crash {CrashPoint.GATEWAY_SHUTDOWN}",
    "postgres read-only",
    f"crash {CrashPoint.SAVED_NOT_COMMITTED}",
    "postgres out of connections",
    "disk full, data",
    f"crash {CrashPoint.UNROUTED_NOT_UNLOADED}",
    f"crash {CrashPoint.COMMITTED}",
    f"crash {CrashPoint.LOADED_NOT_ROUTED}",
    "kill postgres",
    f"crash {CrashPoint.NOT_ACTIVATED}",
    "silence postgres",
    f"crash {CrashPoint.VOTES_STORED}",
    "temporal's database lost",
    "kill temporal",
)
# tests/training/test_killed_trainer.py kills a trainer at each of its points.
POINTS_OF_CHATS = {
    f"{CRASH}{point}" for point in (CrashPoint.MID_STREAM, CrashPoint.REPLY_NOT_STORED, CrashPoint.VOTES_STORED)
}
FAULTS_OF_CHATS = tuple(kind for kind in ALL_FAULTS if not kind.startswith(CRASH) or kind in POINTS_OF_CHATS)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    model = ensure_tiny_model(tmp_path / "models")
    async with stand_in_engine(model.name, seed=1) as engine:
        async with running_stack(tmp_path, model, urlsplit(engine.url).port, recipe=WITH_HINTS) as running:
            yield running


# The checks of the end wait for up to 20 minutes before they name what never came.
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(FAULTS_OF_CHATS, id="of chats"),
        pytest.param(ALL_FAULTS, marks=pytest.mark.long, id="at every crash point and of every service"),
    ],
)
async def test_faults_lose_nothing_and_do_nothing_twice(stack: Stack, faults: Sequence[str]) -> None:
    chatters = Chatters(stack.gateway_url, stack.keys["chat"], think_seconds=0.5, closing=True)
    fuzzer = Fuzzer(stack.gateway_url, stack.keys, pause_seconds=0.1)
    await fuzzer.start()
    chatters.start(sessions=8, seed=1)
    try:
        running = run_these(stack, chatters, fuzzer, faults, seed=1, longest_seconds=1.5)
        outcomes = [outcome async for outcome in running]
    finally:
        await asyncio.gather(chatters.end(), fuzzer.end())
    assert [outcome.kind for outcome in outcomes] == list(faults)
    assert [(outcome.kind, outcome.problems) for outcome in outcomes if outcome.problems] == []
    assert fuzzer.take_problems() == []
    assert await problems_at_the_end(stack, chatters) == []
    assert await judged_turns(stack.database_url) > len(faults)
    assert {kind for kind, _, _ in stored_answers(stack.database_url)} >= {VOTES, HINTS}  # which the checks compared
    assert len(chatters.ended) > 0
    assert [outcome.kind for outcome in outcomes if not outcome.reached] == []
    if faults is ALL_FAULTS:
        assert set(faults) >= {f"{CRASH}{point}" for point in set(CrashPoint) - WHILE_PRACTISING}
        assert sum(outcome.compared for outcome in outcomes) > 0
        of_rows = {"/admin/v1/sessions/{session_id}", "/admin/v1/turns/{turn}"}
        assert {path for path, status in fuzzer.answered if status < 300} >= PROPER.keys() | of_rows
    assert len(chatters.seen) > len(faults)  # they chatted on
