"""Chat requests: what the client gets, and what is recorded."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from starlette.datastructures import Headers

from api.chat import key_limits, stream
from api.chat.request import cache_salt, prepare
from api.dependencies import Limits
from clawloop.core.contracts.serving import ApiKey, Policy, Scope
from clawloop.core.contracts.turns import InsertedTurn, StoredTurn, TurnKind, TurnRecord, TurnStatus
from clawloop.core.ids import EpisodeId, new_api_key_id, response_id
from clawloop.core.settings import ChatBounds
from clawloop.core.turns.identify import named_session_id
from tests.api.chat_requests import IDS, PATH, TEXT, chat_body, events
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import PROMPT_IDS, WORDS, FakeEngine
from tests.fakes.turn_store import FakeTurnStore

# Chat requests that succeed: what the client gets, and what is recorded.


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
    for streamed in (False, True):
        gateway.turns.records.clear()
        async with gateway.client() as client:
            await client.post(PATH, json=chat_body(n=3, stream=streamed))
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
        if name not in {"messages", "model", "logprobs", "top_logprobs", "return_token_ids", "cache_salt", "priority"}
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


# Clients that disconnect, servers that stop and stores that fail, each at the worst moment: no turn is lost.


class SlowStore(FakeTurnStore):
    """Takes 0.2 s to insert.

    Attributes:
        inserting: set once an insert has begun.
        bug: True makes inserts raise an error that no store should raise.
    """

    bug = False

    def __init__(self) -> None:
        super().__init__()
        self.inserting = asyncio.Event()

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        self.inserting.set()
        await asyncio.sleep(0.2)
        if self.bug:
            raise ZeroDivisionError("on purpose")
        return await super().insert(record)


def _use_store(gateway: Gateway, store: FakeTurnStore) -> None:
    gateway.turns = store
    recorder = gateway.services.recorder
    recorder._inserts._store = recorder._drain._store = store


async def _disconnect_while_storing(gateway: Gateway, body: dict[str, Any]) -> None:
    store = SlowStore()
    _use_store(gateway, store)
    async with gateway.client() as client:
        request = asyncio.create_task(client.post(PATH, json=body))
        await asyncio.wait_for(store.inserting.wait(), 30)
        request.cancel()
        await asyncio.wait({request})


async def test_a_client_that_stops_reading_ends_the_engines_request(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_limits, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(stream, "STALL_CHECK_SECONDS", 0.1)
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        with _asking_for_an_endless_stream(gateway):
            (turn,) = await gateway.recorded(1)
            assert turn.status is TurnStatus.ABORTED
            assert len(turn.response_ids or []) > 1
            await until(lambda: engine.aborted)
        # Other clients are still answered.
        async with gateway.client() as other:
            assert (await other.post(PATH, json=chat_body(stream=True))).text.endswith("data: [DONE]\n\n")


@contextmanager
def _asking_for_an_endless_stream(gateway: Gateway) -> Iterator[socket.socket]:
    """The connection of a client that has asked, and has read nothing yet."""
    address = urlsplit(gateway.url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((address.hostname, address.port))
        body = orjson.dumps(chat_body("ENDLESS", stream=True))
        head = f"POST {PATH} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {gateway.key}\r\n"
        head += "Connection: close\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        yield client


async def test_a_client_that_reads_slowly_keeps_its_places_for_a_bounded_time(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STALL_CHECK_SECONDS", 0.1)
    limits = Limits(chat=ChatBounds(blocked_seconds=1))
    async with running_gateway(tmp_path, engines=[engine], limits=limits, places=1) as gateway:
        with _asking_for_an_endless_stream(gateway) as client:
            read = bytearray()

            def read_slowly() -> None:
                while not gateway.turns.records:
                    read.extend(client.recv(4096))
                    time.sleep(0.002)
                while more := client.recv(2**16):
                    read.extend(more)

            reading = asyncio.create_task(asyncio.to_thread(read_slowly))
            # Its place is free again for others, whatever it reads by then.
            async with gateway.client() as other:
                answer = await other.post(PATH, json=chat_body())
            assert answer.status_code == 200
            await reading
        turn = next(turn for turn in gateway.turns.records if turn.finish_reason is None)
        assert turn.status is TurnStatus.ABORTED
        assert len(turn.response_ids or []) > 1
    events = [line for line in bytes(read).split(b"\n") if line.startswith(b"data: ")]
    assert orjson.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "client_too_slow"


async def test_a_shutdown_during_a_stream_records_the_tokens_so_far(tmp_path: Path, engine: FakeEngine) -> None:
    engine.delay_seconds = 0.2
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        _use_store(gateway, SlowStore())

        async def chat() -> httpx.Response:
            async with gateway.client() as client:
                return await client.post(PATH, json=chat_body(stream=True), timeout=30)

        engine.delay_seconds = 3.0
        chatting = asyncio.create_task(chat())
        await until(lambda: engine.requests)
        await asyncio.sleep(0.1)
    answer = await chatting
    assert "gateway_stopping" in answer.text
    assert "[DONE]" not in answer.text
    [turn] = gateway.turns.records
    assert turn.status is TurnStatus.ABORTED


@pytest.mark.parametrize("stream", [True, False])
async def test_finished_choices_are_stored_whole_if_the_client_disconnects_meanwhile(
    fresh_gateway: Gateway, stream: bool
) -> None:
    await _disconnect_while_storing(fresh_gateway, chat_body(n=3, stream=stream))
    turns = await fresh_gateway.recorded(3)
    assert {turn.choice for turn in turns} == {0, 1, 2}
    assert all(turn.response_ids == IDS for turn in turns if turn.status is TurnStatus.COMPLETE)
    if not stream:
        assert {turn.status for turn in turns} == {TurnStatus.COMPLETE}


async def test_all_choices_of_a_broken_stream_are_stored_if_the_client_disconnects(fresh_gateway: Gateway) -> None:
    await _disconnect_while_storing(fresh_gateway, chat_body("BREAK", n=2, stream=True))
    turns = await fresh_gateway.recorded(2)
    assert {turn.status for turn in turns} == {TurnStatus.ERROR}


async def test_a_bug_in_the_store_costs_neither_the_chat_nor_the_turn(fresh_gateway: Gateway) -> None:
    store = SlowStore()
    store.bug = True
    _use_store(fresh_gateway, store)
    async with fresh_gateway.client() as client:
        for word in ("one", "two"):
            answer = await client.post(PATH, json=chat_body(word, stream=True))
            assert answer.text.endswith("data: [DONE]\n\n")
        assert fresh_gateway.spool.turns == 2
        store.bug = False
        turns = await fresh_gateway.recorded(2)
    assert [turn.messages[0]["content"] for turn in turns] == ["one", "two"]


async def test_a_spooled_file_that_vanishes_does_not_block_others(fresh_gateway: Gateway, tmp_path: Path) -> None:
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=chat_body("warm"))
        fresh_gateway.turns.available = False
        for word in ("gone", "kept"):
            await client.post(PATH, json=chat_body(word))
        oldest = min((tmp_path / "spool").glob("*/*.json"))
        oldest.unlink()
        fresh_gateway.turns.available = True
        turns = await fresh_gateway.recorded(2)
    assert [turn.messages[0]["content"] for turn in turns] == ["warm", "kept"]


async def test_the_deepest_accepted_body_survives_the_spool(fresh_gateway: Gateway) -> None:
    deep: Any = "x"
    for _ in range(120):
        deep = [deep]
    body = orjson.dumps(
        chat_body() | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"d": deep}}}]}
    )
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=chat_body("warm"))
        fresh_gateway.turns.available = False
        assert (await client.post(PATH, content=body)).status_code == 200
        assert fresh_gateway.spool.turns == 1
        fresh_gateway.turns.available = True
        turns = await fresh_gateway.recorded(2)
    assert turns[1].tools == orjson.loads(body)["tools"]


# The headers of answers: request id, session and version; a trace goes on to the engine.

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


# What an engine keeps of prompts is found again by the same key alone: who shares it can measure who wrote what.

HEADERS = {"anthropic-version": "2023-06-01"}
BODIES: dict[str, dict[str, Any]] = {
    PATH: chat_body(),
    "/v1/completions": {"model": "policy", "prompt": "x"},
    "/v1/messages": {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "policy", "input": "x"},
}


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/completions"])
async def test_each_key_has_a_cache_of_its_own(gateway: Gateway, path: str) -> None:
    other = gateway.keys.add("default", {Scope.CHAT})
    for secret in (gateway.key, gateway.key, other):
        async with gateway.client(secret) as client:
            assert (await client.post(path, json=BODIES[path], headers=HEADERS)).status_code == 200
    first, again, others = (request["cache_salt"] for request in gateway.engine.requests)
    assert first == again != others


@pytest.mark.parametrize("path", BODIES)
async def test_no_client_chooses_its_salt(gateway: Gateway, path: str) -> None:
    async with gateway.client() as client:
        refused = await client.post(path, json=BODIES[path] | {"cache_salt": "of another"}, headers=HEADERS)
    assert refused.status_code == 400
    assert "cache_salt" in refused.json()["error"]["message"]
    assert not gateway.engine.requests


async def test_a_salt_that_the_operator_lets_through_is_still_the_keys_own(tmp_path: Path, engine: FakeEngine) -> None:
    limits = Limits(engine_fields=("cache_salt",))
    async with running_gateway(tmp_path, engines=[engine], limits=limits) as gateway, gateway.client() as client:
        assert (await client.post(PATH, json=chat_body() | {"cache_salt": "of another"})).status_code == 200
        assert engine.requests[0]["cache_salt"] == str((await gateway.only_key()).id)


async def test_an_operator_can_let_all_keys_share(tmp_path: Path, engine: FakeEngine) -> None:
    limits = Limits(cache_per_key=False)
    async with running_gateway(tmp_path, engines=[engine], limits=limits) as gateway, gateway.client() as client:
        assert (await client.post(PATH, json=chat_body())).status_code == 200
    assert "cache_salt" not in engine.requests[0]


async def test_a_turns_sampling_does_not_name_it(gateway: Gateway) -> None:
    async with gateway.client() as client:
        await client.post(PATH, json=chat_body())
    (turn,) = await gateway.recorded()
    assert "cache_salt" not in turn.sampling


def test_attempts_at_one_task_share_their_prompt() -> None:
    keys = [
        ApiKey(new_api_key_id(), "default", frozenset({Scope.CHAT}), episode=EpisodeId(new_api_key_id()))
        for _ in range(2)
    ]
    person = ApiKey(new_api_key_id(), "default", frozenset({Scope.CHAT}))
    policies = [Policy(name, "base", (), 0, {}) for name in ("default", "other")]
    salts = {cache_salt(key, policies[0], Limits()) for key in keys}
    assert len(salts) == 1
    assert salts.isdisjoint({cache_salt(person, policies[0], Limits()), cache_salt(keys[0], policies[1], Limits())})


# `X-Clawloop-Policy`: a key that may chooses the policy of a request, and no header moves a session.

ANNA = {"X-Clawloop-Policy": "anna"}
RESPONSES = "/v1/responses"


@pytest.fixture
async def two_policies(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with the policies `default`, at version 0, and `anna`, whose version 3 is active."""
    async with running_gateway(tmp_path, engines=[engine]) as running:
        running.directory.add_policy(Policy("anna", "tiny", ("annas-model",), 3, {}), frozenset({3}))
        await running.services.directory.refresh()
        yield running


def key_for(gateway: Gateway, *policies: str) -> str:
    return gateway.keys.add("default", {Scope.CHAT}, policies=policies)


async def post(
    client: httpx.AsyncClient, path: str = PATH, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = chat_body(**fields) if path == PATH else {"model": "policy", **fields}
    return await client.post(path, json=body, headers=headers or {})


async def stored(gateway: Gateway, count: int) -> list[StoredTurn]:
    turns = [await gateway.turns.load(turn.turn_id) for turn in await gateway.recorded(count)]
    return [turn for turn in turns if turn is not None]


@pytest.mark.parametrize("policies", [("anna",), ("*",), ("other", "anna")])
async def test_the_chosen_policy_answers_and_is_recorded(two_policies: Gateway, policies: tuple[str, ...]) -> None:
    async with two_policies.client(key_for(two_policies, *policies)) as client:
        own, chosen = await post(client), await post(client, headers=ANNA)
    assert [answer.headers["x-clawloop-version"] for answer in (own, chosen)] == ["0", "3"]
    assert [request["model"] for request in two_policies.engine.requests] == ["tiny", "anna-v3"]
    turns = await two_policies.recorded(2)
    assert [(turn.policy, turn.version, turn.evidence.policy) for turn in turns] == [
        ("default", 0, None),
        ("anna", 3, "anna"),
    ]


@pytest.mark.parametrize("named", [True, False], ids=["named session", "conversation"])
async def test_a_header_never_moves_a_session(two_policies: Gateway, named: bool) -> None:
    session = {"X-Session-Id": "s"} if named else {}
    said: list[Any] = [{"role": "user", "content": "hello"}]
    again = [*said, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "More."}]
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        for messages in (said, again):
            for headers in ({}, ANNA):
                assert (await post(client, headers=session | headers, messages=messages)).status_code == 200
    own, chosen, own_next, chosen_next = await stored(two_policies, 4)
    assert own.session_id != chosen.session_id
    assert [turn.session_id for turn in (own_next, chosen_next)] == [own.session_id, chosen.session_id]
    assert [turn.parent_turn_id for turn in (own_next, chosen_next)] == [own.record.turn_id, chosen.record.turn_id]


async def test_the_keys_own_policy_named_by_header_is_the_same_session(two_policies: Gateway) -> None:
    async with two_policies.client() as client:
        for headers in ({}, {"X-Clawloop-Policy": "default"}, {"X-Clawloop-Policy": ""}):
            assert (await post(client, headers={"X-Session-Id": "s"} | headers)).status_code == 200
    assert len({turn.session_id for turn in await stored(two_policies, 3)}) == 1


async def test_a_response_goes_on_in_a_session_of_the_chosen_policy(two_policies: Gateway) -> None:
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        first = (await post(client, RESPONSES, ANNA, input="hello")).json()["id"]
        for headers in (ANNA, {}):
            answer = await post(client, RESPONSES, headers, previous_response_id=first, input="and now?")
            assert answer.status_code == 200
    begun, same, other = await stored(two_policies, 3)
    assert (same.session_id, same.parent_turn_id) == (begun.session_id, begun.record.turn_id)
    assert other.session_id != begun.session_id
    assert (other.record.policy, other.parent_turn_id) == ("default", None)
    assert other.record.messages[:2] == same.record.messages[:2]


async def test_feedback_by_a_sessions_name_is_on_the_policys(two_policies: Gateway) -> None:
    key = key_for(two_policies, "anna")
    async with two_policies.client(key) as client:
        for headers in ({}, ANNA):
            await post(client, headers={"X-Session-Id": "s"} | headers)
        own, chosen = [turn.turn_id for turn in await two_policies.recorded(2)]
        last, named = {"turn": "last", "rating": "up"}, {"session_id": "s", "turn": 1, "rating": "up"}
        for body in (last, named):
            for headers, rated in (({}, own), (ANNA, chosen)):
                answer = await client.post("/v1/feedback", json=body, headers=headers)
                assert (answer.status_code, two_policies.sessions.given[-1][0]) == (202, rated), (body, headers)
        once = {"Idempotency-Key": "one"}
        assert (await client.post("/v1/feedback", json=last, headers=once)).status_code == 202
        other = await client.post("/v1/feedback", json=last, headers=once | ANNA)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


@pytest.mark.parametrize("path", [PATH, RESPONSES, "/v1/messages", "/v1/completions"])
async def test_a_key_that_may_not_choose_is_refused_with_the_remedy(two_policies: Gateway, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        PATH: {},
        RESPONSES: {"input": "hello"},
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]},
        "/v1/completions": {"prompt": "hello"},
    }
    async with two_policies.client() as client:
        refused = await post(client, path, ANNA, **bodies[path])
    assert refused.status_code == 403
    assert "`X-Clawloop-Policy`: this key may not choose the policy 'anna'" in refused.json()["error"]["message"]
    assert "clawloop key create --policies" in refused.json()["error"]["message"]
    if path != "/v1/messages":
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("policy_not_allowed", "X-Clawloop-Policy")
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        answer = await post(client, path, ANNA | {"anthropic-version": "2023-06-01"}, **bodies[path])
    assert (answer.status_code, answer.headers["x-clawloop-version"]) == (200, "3")


async def test_a_policy_that_is_not_there_is_not_found(two_policies: Gateway) -> None:
    async with two_policies.client(key_for(two_policies, "*")) as client:
        missing = await post(client, headers={"X-Clawloop-Policy": "nobody"})
        models = await client.get("/v1/models", headers={"X-Clawloop-Policy": "nobody"})
    assert (missing.status_code, models.status_code) == (404, 404)
    error = missing.json()["error"]
    assert (error["code"], error["param"]) == ("policy_not_found", "X-Clawloop-Policy")
    assert two_policies.engine.requests == []


async def test_the_models_are_those_of_the_chosen_policy(two_policies: Gateway) -> None:
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        answer = await client.get("/v1/models", params={"versions": True}, headers=ANNA)
        names = [model["id"] for model in answer.json()["data"]]
        assert names == ["policy", "annas-model", "policy-side", "annas-model-side", "tiny", "anna-v0", "anna-v3"]
        assert (await client.get("/v1/models/anna-v3", headers=ANNA)).status_code == 200
        assert (await client.get("/v1/models/anna-v3")).status_code == 404


async def test_a_turn_waits_in_the_spool_with_the_chosen_policy(two_policies: Gateway) -> None:
    two_policies.turns.available = False
    async with two_policies.client(key_for(two_policies, "anna")) as client:
        assert (await post(client, headers=ANNA | {"X-Session-Id": "s"})).status_code == 200
        two_policies.turns.available = True
        (turn,) = await stored(two_policies, 1)
        assert (await post(client, headers=ANNA | {"X-Session-Id": "s"})).status_code == 200
    assert (turn.record.policy, turn.record.evidence.policy) == ("anna", "anna")
    assert len({one.session_id for one in await stored(two_policies, 2)}) == 1


async def test_a_tools_result_goes_to_the_version_of_its_policy(engine: FakeEngine, tmp_path: Path) -> None:
    async with running_gateway(tmp_path, engines=[engine], active=4, versions=frozenset({4})) as gateway:
        gateway.directory.add_policy(Policy("anna", "tiny", (), 3, {}), frozenset({3}))
        await gateway.services.directory.refresh()
        said: list[Any] = [{"role": "user", "content": "TOOL"}]
        async with gateway.client(key_for(gateway, "anna")) as client:
            reply = (await post(client, messages=said)).json()["choices"][0]["message"]
            await post(client, headers=ANNA, messages=said)
            call = reply["tool_calls"][0]["id"]
            said += [reply, {"role": "tool", "tool_call_id": call, "content": "a.txt"}]
            versions = [
                (await post(client, headers=headers, messages=said)).headers["x-clawloop-version"]
                for headers in ({}, ANNA)
            ]
    assert versions == ["4", "3"]
