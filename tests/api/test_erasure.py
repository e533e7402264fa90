"""`DELETE /admin/v1/sessions/{session_id}` and `/admin/v1/turns/{turn}`, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from clawloop.core.ids import new_turn_id, turn_id_of
from tests.api.chat_requests import chat
from tests.api.conftest import Gateway, running_gateway
from tests.fakes.engine import fake_engine
from tests.fakes.notifier import FakeNotifier


@pytest.fixture
def workflows() -> FakeNotifier:
    return FakeNotifier()


@pytest.fixture
async def gateway(tmp_path: Path, workflows: FakeNotifier) -> AsyncIterator[Gateway]:
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine], notifier=workflows) as running:
        yield running


async def delete(gateway: Gateway, path: str, key: str | None = None) -> tuple[int, dict[str, Any]]:
    async with gateway.client(key or gateway.admin_key) as client:
        answer = await client.delete(f"/admin/v1/{path}")
    return answer.status_code, answer.json()


async def test_a_session_is_erased_once_and_its_workflow_is_notified(gateway: Gateway, workflows: FakeNotifier) -> None:
    turn = turn_id_of(await chat(gateway))
    assert turn is not None
    stored = await gateway.turns.load(turn)
    assert stored is not None
    path = f"sessions/{stored.session_id}"
    body = {
        "session_id": str(stored.session_id),
        "turns": 1,
        "samples_expired": 0,
        "samples_learned": 0,
        "workflow_told": True,
    }
    assert await delete(gateway, path) == (200, body)
    assert await delete(gateway, path) == (200, body | {"turns": 0})
    assert [(session, erased.turns, erased.whole) for session, erased in workflows.erased] == [
        (stored.session_id, (turn,), True)
    ] * 2
    assert gateway.turns.records[-1].messages == []


async def test_a_turn_is_named_by_its_reply_and_erased_while_temporal_is_away(
    gateway: Gateway, workflows: FakeNotifier
) -> None:
    reply = await chat(gateway)
    workflows.available = False
    status, body = await delete(gateway, f"turns/{reply}")
    assert (status, body["turns"], body["workflow_told"]) == (200, 1, False)
    assert gateway.turns.records[-1].messages == []


@pytest.mark.parametrize(
    "unknown",
    [f"sessions/{uuid4()}", f"turns/{new_turn_id()}", "turns/nonsense", "turns/%00"],
    ids=["session", "turn", "no id", "NUL"],
)
async def test_an_unknown_session_or_turn_is_404(gateway: Gateway, unknown: str) -> None:
    status, body = await delete(gateway, unknown)
    assert (status, body["code"]) == (404, "not_found")
