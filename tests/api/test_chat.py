"""What a client sends and gets, and what is recorded of it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import httpx
import orjson
import pytest

from clawloop.contracts.turns import TurnKind, TurnStatus
from clawloop.ids import response_id
from tests.api.conftest import Gateway
from tests.fakes.engine import PROMPT_IDS, WORDS

TEXT = "".join(WORDS)
IDS = [10, 11, 12, 13, 14, 2]


def ask(word: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": word}], **fields}


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else orjson.loads(line) for line in lines]


async def test_a_whole_answer_is_the_engines_own_and_is_recorded_token_for_token(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=ask())
    assert answer.status_code == 200
    body = answer.json()
    [turn] = await gateway.recorded()
    assert body["id"] == response_id(turn.turn_id)
    assert body["choices"][0]["message"]["content"] == TEXT
    assert body["choices"][0]["logprobs"] is None
    assert "token_ids" not in body["choices"][0]
    assert "prompt_token_ids" not in body
    assert turn.prompt_ids == PROMPT_IDS
    assert turn.response_ids == IDS
    assert turn.logprobs == [-token / 100 for token in IDS]
    assert turn.response == {"role": "assistant", "content": TEXT}
    assert (turn.status, turn.kind, turn.version, turn.engine_id) == (TurnStatus.COMPLETE, TurnKind.MAIN, 0, "e0")


async def test_a_stream_is_the_engines_own_and_is_recorded_before_its_end_leaves(gateway: Gateway) -> None:
    async with (
        gateway.client() as client,
        client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        seen: list[Any] = []
        async for line in answer.aiter_lines():
            if not line:
                continue
            seen += events(line)
            if isinstance(seen[-1], dict) and seen[-1]["choices"][0]["finish_reason"]:
                assert len(gateway.turns.records) == 1
    assert seen[-1] == "[DONE]"
    chunks = seen[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)
    assert not any("token_ids" in chunk["choices"][0] or "prompt_token_ids" in chunk for chunk in chunks)
    [turn] = await gateway.recorded()
    assert {chunk["id"] for chunk in chunks} == {response_id(turn.turn_id)}
    assert (turn.prompt_ids, turn.response_ids) == (PROMPT_IDS, IDS)
    assert turn.response == {"role": "assistant", "content": TEXT}


async def test_tokens_arrive_one_by_one_not_at_the_end(gateway: Gateway) -> None:
    gateway.engine.delay_seconds = 0.1
    loop = asyncio.get_running_loop()
    arrived: list[float] = []
    async with (
        gateway.client() as client,
        client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as answer,
    ):
        async for line in answer.aiter_lines():
            if '"content":"' in line:
                arrived.append(loop.time())
    gaps = [later - earlier for earlier, later in pairwise(arrived[1:])]
    assert min(gaps) > 0.05


async def test_a_streamed_tool_call_is_recorded_with_every_token(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=ask("TOOL", stream=True))
    [turn] = await gateway.recorded()
    assert turn.response_ids == [20, 21, 22, 23, 24]
    assert turn.finish_reason == "tool_calls"
    assert turn.response is not None
    assert turn.response["content"] is None
    assert turn.response["tool_calls"] == [
        {
            "id": "chatcmpl-tool-ab12",
            "type": "function",
            "function": {"name": "exec", "arguments": '{"command": "ls"}'},
        }
    ]
    assert events(answer.text)[-1] == "[DONE]"


async def test_thinking_streams_on_under_the_name_clients_read(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=ask("THINK", stream=True))
    deltas = [event["choices"][0]["delta"] for event in events(answer.text)[:-1]]
    assert {"reasoning": "Let me see.", "reasoning_content": "Let me see."} in deltas
    [turn] = await gateway.recorded()
    assert turn.response == {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}


async def test_each_choice_of_n_is_a_turn_of_one_group(gateway: Gateway) -> None:
    for stream in (False, True):
        gateway.turns.records.clear()
        async with gateway.client() as client:
            await client.post("/v1/chat/completions", json=ask(n=3, stream=stream))
        turns = await gateway.recorded(3)
        assert [turn.choice for turn in turns] == [0, 1, 2]
        assert {turn.group_id for turn in turns} == {turns[0].turn_id}
        assert all(turn.response_ids == IDS and turn.prompt_ids == PROMPT_IDS for turn in turns)


async def test_what_the_client_leaves_out_of_the_sampling_is_filled_in_and_recorded(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post("/v1/chat/completions", json=ask(top_p=None, max_tokens=7))
    sent = gateway.engine.requests[0]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.6, 1.0, -1)
    [turn] = await gateway.recorded()
    assert turn.sampling == {
        name: sent[name]
        for name in sent
        if name not in {"messages", "model", "logprobs", "top_logprobs", "return_token_ids"}
    }
    assert turn.sampling["max_tokens"] == 7


async def test_the_clients_own_sampling_is_left_alone(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post("/v1/chat/completions", json=ask(temperature=0.0, top_p=0.9, top_k=5))
    sent = gateway.engine.requests[0]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.0, 0.9, 5)


async def test_messages_and_tools_reach_the_engine_as_they_were_sent(gateway: Gateway) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be\u0000brief"}]},
        {"role": "user", "content": "hé 👋", "name": "ann", "x-extra": {"b": 1, "a": 2.50}},
    ]
    tools = [{"type": "function", "function": {"name": "exec", "parameters": {"type": "object"}}}]
    async with gateway.client() as client:
        await client.post("/v1/chat/completions", json=ask(messages=messages, tools=tools, session_id="s"))
    sent = gateway.engine.requests[0]
    assert (sent["messages"], sent["tools"]) == (messages, tools)
    assert "session_id" not in sent
    [turn] = await gateway.recorded()
    assert (turn.messages, turn.tools) == (messages, tools)


async def test_logprobs_and_token_ids_are_given_to_those_who_ask(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(
            "/v1/chat/completions", json=ask(logprobs=True, top_logprobs=2, return_token_ids=True)
        )
    body = answer.json()
    assert len(body["choices"][0]["logprobs"]["content"]) == len(IDS)
    assert body["choices"][0]["token_ids"] == IDS
    assert body["prompt_token_ids"] == PROMPT_IDS
    assert gateway.engine.requests[0]["top_logprobs"] == 2


@pytest.mark.parametrize("asked", [True, False])
async def test_the_usage_chunk_comes_only_when_asked_for(gateway: Gateway, asked: bool) -> None:
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if asked else {}
    async with gateway.client() as client:
        answer = await client.post("/v1/chat/completions", json=ask(stream=True, **fields))
    assert any(event.get("usage") for event in events(answer.text)[:-1]) is asked


async def test_a_client_that_leaves_ends_the_engines_request_and_what_was_made_is_kept(gateway: Gateway) -> None:
    gateway.engine.delay_seconds = 0.1
    async with gateway.client() as client:
        async with client.stream("POST", "/v1/chat/completions", json=ask(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if " there" in line:
                    break
        [turn] = await gateway.recorded()
    assert turn.status is TurnStatus.ABORTED
    assert turn.response_ids is not None
    assert turn.response_ids == IDS[: len(turn.response_ids)]
    assert 2 <= len(turn.response_ids) < len(IDS)
    assert turn.logprobs is not None
    assert turn.response == {"role": "assistant", "content": "".join(WORDS[: len(turn.response_ids)])}
    async with asyncio.timeout(30):
        while not gateway.engine.aborted:
            await asyncio.sleep(0.01)


async def test_a_client_that_leaves_before_a_whole_answer_ends_the_engines_request(gateway: Gateway) -> None:
    gateway.engine.delay_seconds = 60
    async with gateway.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/chat/completions", json=ask(), timeout=0.3)
    [turn] = await gateway.recorded()
    assert (turn.status, turn.response_ids, turn.logprobs) == (TurnStatus.ABORTED, None, None)
    async with asyncio.timeout(30):
        while not gateway.engine.aborted:
            await asyncio.sleep(0.01)
    assert len(gateway.engine.requests) == 1


async def test_an_answer_cut_by_length_says_so(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post("/v1/chat/completions", json=ask("LONG", stream=True))
    [turn] = await gateway.recorded()
    assert turn.status is TurnStatus.LENGTH


async def test_64_streams_at_once(gateway: Gateway) -> None:
    gateway.engine.delay_seconds = 0.05
    async with gateway.client() as client:
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=ask(stream=True)) for _ in range(64)))
    assert all(events(answer.text)[-1] == "[DONE]" for answer in answers)
    assert len(await gateway.recorded(64)) == 64


async def test_side_turns_are_named_as_such(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post("/v1/chat/completions", json=ask() | {"model": "policy-side"})
        await client.post("/v1/chat/completions", json=ask(), headers={"X-Turn-Type": "side"})
        await client.post("/v1/chat/completions", json=ask() | {"model": "qwen3-4b"})
    turns = await gateway.recorded(3)
    assert [turn.kind for turn in turns] == [TurnKind.SIDE, TurnKind.SIDE, TurnKind.MAIN]
    assert all(turn.kind_reason for turn in turns)


async def test_the_openai_sdk_streams_and_calls_tools(gateway: Gateway) -> None:
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == TEXT
        whole = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "TOOL"}])
        assert whole.choices[0].message.tool_calls is not None
        models = [model.id async for model in client.models.list()]
        assert models == ["policy", "qwen3-4b", "policy-side"]
