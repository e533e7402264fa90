"""`POST /admin/v1/turns/{turn}/judge`, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from clawloop.contracts.sessions import RejudgeRequested
from clawloop.ids import new_turn_id, response_id, turn_id_of
from tests.api.chat_requests import chat
from tests.api.conftest import Gateway, running_gateway
from tests.api.test_feedback import give
from tests.fakes.engine import fake_engine
from tests.fakes.notifier import FakeNotifier


@pytest.fixture
def operations() -> FakeNotifier:
    return FakeNotifier()


@pytest.fixture
async def gateway(tmp_path: Path, operations: FakeNotifier) -> AsyncIterator[Gateway]:
    async with fake_engine() as engine, running_gateway(tmp_path, engines=[engine], notifier=operations) as running:
        yield running


async def judge(gateway: Gateway, turn: str, key: str | None = None) -> tuple[int, dict[str, Any], dict[str, str]]:
    async with gateway.client(key or gateway.admin_key) as client:
        answer = await client.post(f"/admin/v1/turns/{turn}/judge")
    return answer.status_code, answer.json(), dict(answer.headers)


async def rated(gateway: Gateway) -> str:
    """A reply there is something to judge by."""
    reply = await chat(gateway)
    assert (await give(gateway, {"response_id": reply, "text": "Too long."}))[0] == 202
    return reply


async def test_a_turn_nobody_has_answered_is_refused(gateway: Gateway, operations: FakeNotifier) -> None:
    status, body, _ = await judge(gateway, await chat(gateway))
    assert (status, body["code"]) == (409, "cannot_judge_again")
    assert "nothing has followed it yet, and nobody has given feedback on it" in body["detail"]
    assert not any(isinstance(message, RejudgeRequested) for _, message in operations.sent)


async def test_a_turn_is_named_by_its_id_or_its_replys_and_its_workflow_is_told(
    gateway: Gateway, operations: FakeNotifier
) -> None:
    reply = await rated(gateway)
    turn = turn_id_of(reply)
    assert turn is not None
    for name in (reply, str(turn)):
        status, body, _ = await judge(gateway, name)
        assert (status, body["turn_id"], body["revision"]) == (202, str(turn), 0)
    # Asked twice before it is judged, it is the same judgement.
    asked = [message for _, message in operations.sent if isinstance(message, RejudgeRequested)]
    assert asked == [RejudgeRequested(turn, 0)] * 2


@pytest.mark.parametrize("unknown", [response_id(new_turn_id()), "nonsense", "%00"])
async def test_a_turn_nobody_knows_is_404(gateway: Gateway, unknown: str) -> None:
    status, body, headers = await judge(gateway, unknown)
    assert (status, body["code"], headers["content-type"]) == (404, "not_found", "application/problem+json")


async def test_a_side_turn_is_refused_and_nobody_is_told(gateway: Gateway, operations: FakeNotifier) -> None:
    status, body, _ = await judge(gateway, await chat(gateway, turn_type="side"))
    assert (status, body["code"]) == (409, "cannot_judge_again")
    assert "side turn" in body["detail"]
    assert operations.sent == []


async def test_without_temporal_it_says_when_to_come_back(gateway: Gateway, operations: FakeNotifier) -> None:
    reply = await rated(gateway)
    operations.available = False
    status, body, headers = await judge(gateway, reply)
    assert (status, body["code"], headers["retry-after"]) == (503, "temporal_unavailable", "5")


async def test_it_needs_an_admin_key(gateway: Gateway) -> None:
    assert (await judge(gateway, await chat(gateway), gateway.key))[0] == 403
