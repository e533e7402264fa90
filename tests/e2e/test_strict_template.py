"""A real engine whose model's template refuses the orders of roles that agents send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from clawloop.serving.endpoints import Endpoint
from clawloop.serving.rendering import EngineRenderer
from db.schema import migrate
from tests.conftest import database_address, execute
from tests.e2e.gateway import RealGateway, prepared, running_gateway

VERSION = {"anthropic-version": "2023-06-01"}
LATE: list[Any] = [{"role": "user", "content": "What time is it?"}, {"role": "system", "content": "# Environment"}]
TOOL = {"name": "get_time", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
async def gateway(postgres_server: Any, strict_engine_url: str, tmp_path_factory: Any) -> AsyncIterator[RealGateway]:
    execute(postgres_server.url, "CREATE DATABASE strict_template")
    url = database_address(postgres_server.url, "strict_template")
    await asyncio.to_thread(migrate, url)
    data = tmp_path_factory.mktemp("gateway")
    async with running_gateway(url, await prepared(url, [strict_engine_url]), data) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_sent_is_recorded_and_rendered_again(
    gateway: RealGateway, strict_engine_url: str, stream: bool
) -> None:
    given = {"model": "policy", "max_tokens": 64000, "system": "S", "messages": LATE, "tools": [TOOL], "stream": stream}
    async with gateway.client() as client:
        answer = await client.post("/v1/messages", json=given, headers=VERSION)
    assert answer.status_code == 200, answer.text
    message_id = answer.text.partition('"id":"')[2].partition('"')[0]
    turn = (await gateway.turn(message_id)).record
    assert turn.prompt_ids
    assert [each["role"] for each in turn.messages] == ["system", "user", "system"]
    fits = 4096 - len(turn.prompt_ids)
    assert answer.headers["x-clawloop-changed"] == f"roles, max_tokens={fits}"
    # As a teacher's prompt is rendered: no template mismatch.
    async with EngineRenderer(lambda policy: [Endpoint(strict_engine_url, "tiny-random")]) as renderer:
        assert await renderer.render(turn, turn.messages) == turn.prompt_ids


async def test_reasoning_that_a_client_does_not_want_is_recorded_with_its_tokens(gateway: RealGateway) -> None:
    given = {"model": "policy", "max_tokens": 12, "include_reasoning": False, "messages": [LATE[0]]}
    for stream in (False, True):
        async with gateway.client() as client:
            answer = await client.post("/v1/chat/completions", json=given | {"stream": stream})
        assert answer.status_code == 200
        turn = (await gateway.turn(answer.text.partition('"id":"')[2].partition('"')[0])).record
        assert turn.error is None
        assert turn.response_ids
        assert turn.logprobs
        assert len(turn.response_ids) == len(turn.logprobs)
        assert '"reasoning":' not in answer.text
        assert '"reasoning_content":' not in answer.text
        if not stream:
            assert len(turn.response_ids) == answer.json()["usage"]["completion_tokens"]


async def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(gateway: RealGateway) -> None:
    for words in (5000, 200_000):
        long = [{"role": "user", "content": "time " * words}]
        async with gateway.client() as client:
            answer = await client.post(
                "/v1/messages", json={"model": "policy", "max_tokens": 5, "messages": long}, headers=VERSION
            )
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("prompt is too long: ")
        assert answer.json()["error"]["message"].endswith(" tokens > 4096 maximum")
