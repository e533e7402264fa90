"""Reactions that clients pass on are stored though a turn came late or PostgreSQL is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from api.recording import notifier
from api.recording.notifier import NotificationQueue
from clawloop.core.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, TurnRecord
from clawloop.core.telemetry.metrics import GatewayMetrics
from tests.api.conftest import until
from tests.fakes.session_store import FakeSessionStore
from tests.fakes.turn_store import FakeTurnStore
from tests.records import turn_record

EVENT = "System: [2026-11-23 12:54:48 UTC] Telegram reaction added: 👎 by Alice (@alice) on msg 42"
FRAME = f'<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\n"{EVENT}"\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>'
NAMED = SessionEvidence(SessionSource.HEADER, "alice")


@dataclass
class Case:
    """
    Attributes:
        first: the turn whose reply is rated; second: the turn whose request holds the reaction.
    """

    turns: FakeTurnStore
    sessions: FakeSessionStore
    notifications: NotificationQueue
    first: TurnRecord
    second: TurnRecord

    def given(self) -> bool:
        return self.sessions.given == [(self.first.turn_id, -1.0, None)]


@pytest.fixture
async def case(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Case]:
    monkeypatch.setattr(notifier, "RATING_PAUSES", (0.05,) * 100)
    turns = FakeTurnStore()
    sessions = FakeSessionStore(turns)
    said: list[Message] = [{"role": "user", "content": "hello"}]
    first = turn_record(messages=said, evidence=NAMED)
    assert first.response is not None
    said = [*said, first.response, {"role": "user", "content": FRAME}]
    second = turn_record(messages=said, evidence=NAMED)
    async with NotificationQueue(None, turns, sessions, GatewayMetrics()) as notifications:
        yield Case(turns, sessions, notifications, first, second)


async def test_of_a_turn_that_was_stored_already_though_it_went_by_the_disk(case: Case) -> None:
    await case.turns.insert(case.first)
    await case.turns.insert(case.second)  # nobody saw that it ended: the turn went to the disk meanwhile
    inserted = await case.turns.insert(case.second)
    assert inserted.duplicate
    case.notifications.add_turn(case.second, inserted)
    await until(case.given)
    case.notifications.add_turn(case.second, inserted)
    await asyncio.sleep(0.2)
    assert case.given()


async def test_on_a_reply_that_is_on_the_disk_yet(case: Case) -> None:
    inserted = await case.turns.insert(case.second)
    assert inserted.parent_turn_id is None
    case.notifications.add_turn(case.second, inserted)
    await asyncio.sleep(0.2)
    assert case.sessions.given == []
    await case.turns.insert(case.first)
    await until(case.given)


async def test_while_postgresql_is_away(case: Case) -> None:
    await case.turns.insert(case.first)
    inserted: InsertedTurn = await case.turns.insert(case.second)
    case.turns.available = False
    case.notifications.add_turn(case.second, inserted)
    await asyncio.sleep(0.2)
    case.turns.available = True
    await until(case.given)
