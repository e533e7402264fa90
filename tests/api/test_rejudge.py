"""`POST /admin/v1/turns/{turn}/judge`, and of many turns, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from clawloop.core.contracts.sessions import RejudgeRequested
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import new_turn_id, response_id, turn_id_of
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


async def judgeable(gateway: Gateway) -> str:
    """A reply with feedback, so that there is something to judge it by."""
    reply = await chat(gateway)
    assert (await give(gateway, {"response_id": reply, "text": "Too long."}))[0] == 202
    return reply


async def test_a_turn_that_nothing_has_followed_is_refused(gateway: Gateway, operations: FakeNotifier) -> None:
    status, body, _ = await judge(gateway, await chat(gateway))
    assert (status, body["code"]) == (409, "cannot_judge_again")
    assert "no message has followed it yet, and it has no feedback" in body["detail"]
    assert not any(isinstance(message, RejudgeRequested) for _, message in operations.sent)


async def test_a_turn_is_named_by_its_id_or_its_replys_and_its_workflow_is_notified(
    gateway: Gateway, operations: FakeNotifier
) -> None:
    reply = await judgeable(gateway)
    turn = turn_id_of(reply)
    assert turn is not None
    for name in (reply, str(turn)):
        status, body, _ = await judge(gateway, name)
        assert (status, body["turn_id"], body["revision"]) == (202, str(turn), 0)
    # Asked twice before it is judged, it is the same judgement.
    asked = [message for _, message in operations.sent if isinstance(message, RejudgeRequested)]
    assert asked == [RejudgeRequested(turn, 0)] * 2


@pytest.mark.parametrize("unknown", [response_id(new_turn_id()), "nonsense", "%00"], ids=["turn", "no id", "NUL"])
async def test_an_unknown_turn_is_404(gateway: Gateway, unknown: str) -> None:
    status, body, headers = await judge(gateway, unknown)
    assert (status, body["code"], headers["content-type"]) == (404, "not_found", "application/problem+json")


async def test_a_side_turn_is_refused_without_a_signal(gateway: Gateway, operations: FakeNotifier) -> None:
    status, body, _ = await judge(gateway, await chat(gateway, turn_type="side"))
    assert (status, body["code"]) == (409, "cannot_judge_again")
    assert "side turn" in body["detail"]
    assert operations.sent == []


async def test_without_temporal_the_answer_says_when_to_retry(gateway: Gateway, operations: FakeNotifier) -> None:
    reply = await judgeable(gateway)
    operations.available = False
    status, body, headers = await judge(gateway, reply)
    assert (status, body["code"], headers["retry-after"]) == (503, "temporal_unavailable", "5")


async def post(gateway: Gateway, path: str, key: str | None = None) -> tuple[int, dict[str, Any]]:
    async with gateway.client(key or gateway.admin_key) as client:
        answer = await client.post(f"/admin/v1/{path}")
    return answer.status_code, answer.json()


async def test_a_session_is_judged_again_but_for_turns_that_cannot_be(
    gateway: Gateway, operations: FakeNotifier
) -> None:
    turn = turn_id_of(await judgeable(gateway))
    assert turn is not None
    stored = await gateway.turns.load(turn)
    assert stored is not None
    result = {"turn_id": str(turn), "session_id": str(stored.session_id), "revision": 0, "refused": None}
    assert await post(gateway, f"sessions/{stored.session_id}/judge") == (202, {"turns": [result]})
    requests = [message for _, message in operations.sent if isinstance(message, RejudgeRequested)]
    assert requests == [RejudgeRequested(turn, 0)]
    status, body = await post(gateway, f"sessions/{uuid4()}/judge")
    assert (status, body["code"]) == (404, "not_found")


async def test_turns_without_a_valid_vote_are_judged_again(gateway: Gateway, operations: FakeNotifier) -> None:
    turn = turn_id_of(await judgeable(gateway))
    assert turn is not None
    assert await post(gateway, "unjudged/judge") == (202, {"turns": []})
    gateway.turns.fates[turn] = TurnOutcome.UNJUDGED, None
    status, body = await post(gateway, "unjudged/judge")
    assert (status, [result["turn_id"] for result in body["turns"]]) == (202, [str(turn)])
    assert (await post(gateway, "unjudged/judge", gateway.key))[0] == 403
