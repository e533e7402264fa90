"""Twenty faults in the whole system, one after the other, while sessions chat: nothing is lost or done twice.

All processes are real but the engine, which has no model. `make chaos` has a real one, and chooses faults by seed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from clawloop.crash_points import CrashPoint
from clawloop.local.tiny_model import ensure_tiny_model
from tests.chaos.chatters import Chatters
from tests.chaos.run import run_these
from tests.chaos.stack import Stack, running_stack
from tests.chaos.stand_in_engine import stand_in_engine

pytestmark = [pytest.mark.slow, pytest.mark.postgres]

FAULTS = (
    "kill judge",
    "cut gateway",
    f"crash {CrashPoint.MID_STREAM}",
    "kill orchestrator",
    "kill trainer",
    f"crash {CrashPoint.REPLY_NOT_STORED}",
    "cut postgres",
    "kill postgres",
    f"crash {CrashPoint.VOTES_STORED}",
    "refuse engine",
    "kill temporal",
    "silence postgres",
    "kill engine-agent",
    f"crash {CrashPoint.GATEWAY_SHUTDOWN}",
    "postgres read-only",
    "double temporal",
    "postgres backend killed",
    "cut engine",
    "postgres out of connections",
    "kill gateway",
)


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    model = ensure_tiny_model(tmp_path / "models")
    async with stand_in_engine(model.name, seed=1) as engine:
        async with running_stack(tmp_path, model, urlsplit(engine.url).port) as running:
            yield running


@pytest.mark.timeout(1500)
async def test_twenty_faults_lose_nothing_and_do_nothing_twice(stack: Stack) -> None:
    chatters = Chatters(stack.gateway_url, stack.keys["chat"], think_seconds=0.5)
    chatters.start(sessions=8, seed=1)
    try:
        outcomes = [outcome async for outcome in run_these(stack, chatters, FAULTS, seed=1, longest_seconds=1.5)]
    finally:
        await chatters.end()
    assert [outcome.kind for outcome in outcomes] == list(FAULTS)
    assert [(outcome.kind, outcome.problems) for outcome in outcomes if outcome.problems] == []
    assert [outcome.kind for outcome in outcomes if not outcome.reached] == []
    assert len(chatters.seen) > len(FAULTS)  # they chatted on
