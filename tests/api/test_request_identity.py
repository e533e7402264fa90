"""The headers of answers: request id, session and version; a trace goes on to the engine."""

from __future__ import annotations

import pytest

from clawloop.core.turns.identify import named_session_id
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("path", ["/v1/models", "/healthz", "/v1/nothing", "/v1/messages"])
async def test_every_answer_has_the_requests_id(gateway: Gateway, path: str) -> None:
    async with gateway.client() as client:
        own = await client.get(path, headers={"X-Request-Id": "mine-1"})
        made = await client.get(path)
        wrong = await client.get(path, headers={"X-Request-Id": "x" * 129})
    assert own.headers["x-request-id"] == "mine-1"
    assert made.headers["x-request-id"].startswith("req_")
    assert wrong.headers["x-request-id"].startswith("req_")
    assert ("request-id" in own.headers) == (path == "/v1/messages")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_chat_has_its_named_session_and_version(gateway: Gateway, stream: bool) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(stream=stream), headers={"X-Session-Id": "s1"})
    (turn,) = await gateway.recorded()
    assert answer.headers["x-clawloop-session"] == str(named_session_id(turn.api_key_id, turn.evidence))
    assert answer.headers["x-clawloop-version"] == "0"


async def test_a_whole_answer_has_the_session_that_its_messages_name(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body())
    (turn,) = await gateway.recorded()
    stored = await gateway.turns.load(turn.turn_id)
    assert stored is not None
    assert answer.headers["x-clawloop-session"] == str(stored.session_id)


async def test_a_valid_trace_is_passed_on_and_no_request_id(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body(), headers={"traceparent": TRACE, "X-Request-Id": "mine"})
        await client.post(PATH, json=chat_body(), headers={"traceparent": "not a trace"})
    assert gateway.engine.traces == [TRACE, None]
