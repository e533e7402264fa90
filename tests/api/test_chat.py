"""Chat requests that succeed: what the client gets, and what is recorded."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers

from api.chat.request import prepare
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.turns import TurnKind, TurnStatus
from clawloop.core.ids import response_id
from tests.api.chat_requests import IDS, PATH, TEXT, chat_body, events
from tests.api.conftest import Gateway, until
from tests.fakes.engine import PROMPT_IDS, WORDS


async def test_a_whole_answer_is_relayed_and_recorded_token_for_token(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body())
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


async def test_a_stream_is_relayed_and_recorded_before_its_last_chunk_is_sent(gateway: Gateway) -> None:
    async with (
        gateway.client() as client,
        client.stream("POST", PATH, json=chat_body(stream=True)) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        received: list[Any] = []
        async for line in answer.aiter_lines():
            if not line:
                continue
            received += events(line)
            if isinstance(received[-1], dict) and received[-1]["choices"][0]["finish_reason"]:
                assert len(gateway.turns.records) == 1
    assert received[-1] == "[DONE]"
    chunks = received[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == TEXT
    assert all(chunk["choices"][0]["logprobs"] is None for chunk in chunks)
    assert not any("token_ids" in chunk["choices"][0] or "prompt_token_ids" in chunk for chunk in chunks)
    [turn] = await gateway.recorded()
    assert {chunk["id"] for chunk in chunks} == {response_id(turn.turn_id)}
    assert (turn.prompt_ids, turn.response_ids) == (PROMPT_IDS, IDS)
    assert turn.response == {"role": "assistant", "content": TEXT}


async def test_tokens_arrive_as_the_engine_makes_them(gateway: Gateway) -> None:
    gateway.engine.halt = 3
    arrived = []
    async with (
        gateway.client() as client,
        client.stream("POST", PATH, json=chat_body(stream=True)) as answer,
    ):
        async for line in answer.aiter_lines():
            if '"content":"' in line:
                arrived.append(line)
                if '" there' in line:
                    gateway.engine.go_on.set()  # the engine had made no more until then
    assert len(arrived) > 3


async def test_a_streamed_tool_call_is_recorded_with_every_token(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body("TOOL", stream=True))
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


async def test_reasoning_is_streamed_under_both_names(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body("THINK", stream=True))
    deltas = [event["choices"][0]["delta"] for event in events(answer.text)[:-1]]
    assert {"reasoning": "Let me see.", "reasoning_content": "Let me see."} in deltas
    [turn] = await gateway.recorded()
    assert turn.response == {"role": "assistant", "content": "Yes.", "reasoning_content": "Let me see."}


async def test_each_choice_of_n_is_a_turn_of_one_group(gateway: Gateway) -> None:
    for stream in (False, True):
        gateway.turns.records.clear()
        async with gateway.client() as client:
            await client.post(PATH, json=chat_body(n=3, stream=stream))
        turns = await gateway.recorded(3)
        assert [turn.choice for turn in turns] == [0, 1, 2]
        assert {turn.group_id for turn in turns} == {turns[0].turn_id}
        assert all(turn.response_ids == IDS and turn.prompt_ids == PROMPT_IDS for turn in turns)


async def test_sampling_fields_the_client_omits_are_filled_in_and_recorded(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body(top_p=None, max_tokens=7))
    sent = gateway.engine.requests[0]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.6, 1.0, -1)
    [turn] = await gateway.recorded()
    assert turn.sampling == {
        name: sent[name]
        for name in sent
        if name not in {"messages", "model", "logprobs", "top_logprobs", "return_token_ids", "cache_salt"}
    }
    assert turn.sampling["max_tokens"] == 7


async def test_the_clients_sampling_fields_are_not_changed(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body(temperature=0.0, top_p=0.9, top_k=5))
    sent = gateway.engine.requests[0]
    assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.0, 0.9, 5)


async def test_messages_and_tools_reach_the_engine_unchanged(gateway: Gateway) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be\u0000brief"}]},
        {"role": "user", "content": "hé 👋", "name": "ann", "x-extra": {"b": 1, "a": 2.50}},
    ]
    tools = [{"type": "function", "function": {"name": "exec", "parameters": {"type": "object"}}}]
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body(messages=messages, tools=tools, session_id="s"))
    sent = gateway.engine.requests[0]
    assert (sent["messages"], sent["tools"]) == (messages, tools)
    assert "session_id" not in sent
    [turn] = await gateway.recorded()
    assert (turn.messages, turn.tools) == (messages, tools)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "exec"}}, "auto", None])
async def test_a_forced_call_has_the_form_of_its_schema(gateway: Gateway, choice: Any) -> None:
    """Without `strict` vLLM lets a forced call have any JSON as its arguments."""
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    bare = [
        {"type": "function", "function": {"name": "exec", "parameters": parameters}},
        {"type": "function", "function": {"name": "free", "parameters": parameters, "strict": False}},
        {"type": "function", "function": {"name": "none"}},
    ]
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body(tools=bare, tool_choice=choice))
    sent = [tool["function"].get("strict") for tool in gateway.engine.requests[0]["tools"]]
    assert sent == [None if choice in ("auto", None) else True, False, None]
    [turn] = await gateway.recorded()
    assert turn.tools == bare


async def test_logprobs_and_token_ids_are_returned_on_request(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(logprobs=True, top_logprobs=2, return_token_ids=True))
    body = answer.json()
    assert len(body["choices"][0]["logprobs"]["content"]) == len(IDS)
    assert body["choices"][0]["token_ids"] == IDS
    assert body["prompt_token_ids"] == PROMPT_IDS
    assert gateway.engine.requests[0]["top_logprobs"] == 2


@pytest.mark.parametrize("requested", [True, False])
async def test_the_usage_chunk_is_sent_only_on_request(gateway: Gateway, requested: bool) -> None:
    fields: dict[str, Any] = {"stream_options": {"include_usage": True}} if requested else {}
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(stream=True, **fields))
    assert any(event.get("usage") for event in events(answer.text)[:-1]) is requested


async def test_a_disconnect_ends_the_engines_request_and_records_the_tokens_so_far(gateway: Gateway) -> None:
    gateway.engine.halt = 3
    async with gateway.client() as client:
        async with client.stream("POST", PATH, json=chat_body(stream=True)) as answer:
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
    await until(lambda: gateway.engine.aborted)


async def test_a_disconnect_before_a_whole_answer_ends_the_engines_request(gateway: Gateway) -> None:
    gateway.engine.delay_seconds = 60
    async with gateway.client() as client:
        leaving = asyncio.create_task(client.post(PATH, json=chat_body()))
        await until(lambda: gateway.engine.requests)
        leaving.cancel()
        await asyncio.wait([leaving])
    [turn] = await gateway.recorded()
    assert (turn.status, turn.response_ids, turn.logprobs) == (TurnStatus.ABORTED, None, None)
    await until(lambda: gateway.engine.aborted)
    assert len(gateway.engine.requests) == 1


async def test_an_answer_cut_by_length_is_recorded_as_such(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body("LONG", stream=True))
    [turn] = await gateway.recorded()
    assert turn.status is TurnStatus.LENGTH


async def test_64_concurrent_streams(gateway: Gateway) -> None:
    gateway.engine.delay_seconds = 0.05
    async with gateway.client() as client:
        answers = await asyncio.gather(*(client.post(PATH, json=chat_body(stream=True)) for _ in range(64)))
    assert all(events(answer.text)[-1] == "[DONE]" for answer in answers)
    assert len(await gateway.recorded(64)) == 64


async def test_side_turns_are_recorded_as_such(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body() | {"model": "policy-side"})
        await client.post(PATH, json=chat_body(), headers={"X-Turn-Type": "side"})
        await client.post(PATH, json=chat_body() | {"model": "qwen3-4b"})
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
        assert models == ["policy", "qwen3-4b", "policy-side", "qwen3-4b-side"]
        assert (await client.models.retrieve("qwen3-4b")).id == "qwen3-4b"


async def test_every_answer_is_counted_by_status(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=chat_body())
        await client.post(PATH, json={})
        await client.post(PATH, json=chat_body() | {"model": "nobody"})
        metrics = (await client.get("/metrics")).text
    for status in ("200", "400", "404"):
        assert f'clawloop_gateway_requests_total{{status="{status}"}} 1.0' in metrics


async def test_a_conversation_without_a_system_prompt_has_one_affinity(fresh_gateway: Gateway) -> None:
    bearer = Headers({"authorization": f"Bearer {fresh_gateway.key}"})
    key = await fresh_gateway.services.keys.require(bearer, Scope.CHAT)
    history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    affinities = set()
    for _ in range(3):
        chat = await prepare(fresh_gateway.services, key, Headers(), chat_body(messages=list(history)))
        affinities.add(chat.affinity)
        history += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    assert len(affinities) == 1
