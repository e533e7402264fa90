"""Engines that are away, full, wrong or behind, and what names stand for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.chat.models import ModelChoice, resolve_name
from api.chat.versions import VersionChooser
from clawloop.core.contracts.serving import Engine, Policy, Scope
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnStatus
from clawloop.core.errors import ClawloopError, JudgeRefused, JudgeUnavailable, RequestRejected
from clawloop.core.ids import ApiKeyId
from clawloop.core.judging.prompts import AnswerForm, JudgePrompt
from clawloop.serving.endpoints import JUDGE_BEHIND, Endpoint
from clawloop.serving.judge import JudgeClient
from tests.api.chat_requests import IDS, PATH, TEXT, chat_body, events
from tests.api.conftest import Gateway, running_gateway, until
from tests.api.gateway_thread import gateway_thread
from tests.api.test_any_shape import EXAMPLES, error_fields
from tests.fakes.engine import FakeEngine, fake_engine
from tests.fakes.judge import fake_judge
from tests.fakes.turn_store import FakeTurnStore

# Engines that refuse, break, send bad data or are away: what the client gets, and what is recorded.


@pytest.mark.parametrize("stream", [False, True])
async def test_a_context_overflow_keeps_status_and_message_and_gets_openais_code(
    gateway: Gateway, stream: bool
) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body("OVERFLOW", stream=stream))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 4096" in error["message"]
    assert not gateway.turns.records


async def test_an_engines_failure_is_502_with_its_reason_and_recorded(gateway: Gateway) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body("FAIL500"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_broke")
    assert "EngineCore" in answer.json()["error"]["message"]
    [turn] = await gateway.recorded()
    assert (turn.status, turn.response, turn.response_ids) == (TurnStatus.ERROR, None, None)


async def test_an_answer_that_is_not_json_is_502_in_openais_shape(gateway: Gateway) -> None:
    async with gateway.client() as client:
        for word in ("GARBAGE", "HTML"):
            answer = await client.post(PATH, json=chat_body(word))
            assert answer.status_code == 502
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (await client.post(PATH, json=chat_body())).status_code == 200


@pytest.mark.parametrize("word", ["BREAK", "RESETMID", "GARBAGE", "ERROREVENT"])
async def test_a_broken_stream_ends_in_an_error_event_and_its_tokens_are_recorded(gateway: Gateway, word: str) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(word, stream=True))
        *chunks, last = events(answer.text)
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert "[DONE]" not in answer.text
        assert (await client.post(PATH, json=chat_body(stream=True))).text.endswith("data: [DONE]\n\n")
    broken, _ = await gateway.recorded(2)
    assert broken.status is TurnStatus.ERROR
    assert broken.error
    assert broken.response_ids == IDS[:2]
    assert broken.response == {"role": "assistant", "content": "Hello there"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello there"


@pytest.mark.parametrize(("word", "reason"), [("UNEVEN", "log-probs"), ("NOIDS", "token ids")])
@pytest.mark.parametrize("stream", [False, True])
async def test_inconsistent_tokens_are_discarded_and_the_chat_goes_on(
    gateway: Gateway, word: str, reason: str, stream: bool
) -> None:
    async with gateway.client() as client:
        answer = await client.post(PATH, json=chat_body(word, stream=stream))
    assert answer.status_code == 200
    [turn] = await gateway.recorded()
    assert (turn.response_ids, turn.logprobs) == (None, None)
    assert turn.error is not None
    assert reason in turn.error
    assert turn.response == {"role": "assistant", "content": TEXT}


@pytest.mark.parametrize("probed", [False, True])
async def test_a_request_waits_while_the_only_engine_restarts(tmp_path: Path, probed: bool) -> None:
    async with AsyncExitStack() as first_engine:
        first = await first_engine.enter_async_context(fake_engine())
        port = int(first.url.rsplit(":", 1)[1])
        async with running_gateway(tmp_path, engines=[first]) as gateway, gateway.client() as client:
            await until(gateway.services.engines.healthy)
            await first_engine.aclose()
            if probed:
                await until(lambda: not gateway.services.engines.healthy())
            request = asyncio.create_task(client.post(PATH, json=chat_body(stream=True)))
            await until(lambda: _waiting(gateway) == 1)
            async with fake_engine(port) as second:
                answer = await request
            assert events(answer.text)[-1] == "[DONE]"
            assert _waiting(gateway) == 0
            assert (len(first.requests), len(second.requests)) == (0, 1)
            [turn] = await gateway.recorded()
            assert (turn.status, turn.response_ids) == (TurnStatus.COMPLETE, IDS)


def _waiting(gateway: Gateway) -> float | None:
    """How many requests wait for an engine."""
    return gateway.services.metrics.registry.get_sample_value("clawloop_gateway_requests_held")


async def test_requests_to_a_dead_engine_go_to_another(tmp_path: Path, engine: FakeEngine) -> None:
    async with fake_engine() as dying, running_gateway(tmp_path, engines=[dying, engine]) as gateway:
        async with gateway.client() as client:
            await until(lambda: len(gateway.services.engines.healthy()) == 2)
            gateway.directory.set_engines(
                [Engine("e0", "http://127.0.0.1:9", {}, False), Engine("e1", engine.url, {}, False)]
            )
            await until(lambda: gateway.services.directory.snapshot.engines[0].url.endswith(":9"))
            answers = await asyncio.gather(*(client.post(PATH, json=chat_body(f"q{n}")) for n in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8


async def test_without_an_engine_few_requests_wait_and_others_get_503_at_once(
    tmp_path: Path, engine: FakeEngine
) -> None:
    engine.healthy = False
    async with running_gateway(tmp_path, engines=[engine], hold_seconds=60) as gateway, gateway.client() as client:
        held = [asyncio.create_task(client.post(PATH, json=chat_body())) for _ in range(2)]
        await until(lambda: _waiting(gateway) == 2)
        refused = [await client.post(PATH, json=chat_body()) for _ in range(3)]
        engine.healthy = True
        assert [(await answer).status_code for answer in held] == [200, 200]
    assert [answer.status_code for answer in refused] == [503] * 3
    assert all(answer.headers["Retry-After"] for answer in refused)
    assert {answer.json()["error"]["code"] for answer in refused} == {"engine_unavailable"}
    assert all("wait for one already" in answer.json()["error"]["message"] for answer in refused)


async def test_a_request_that_waited_for_an_engine_in_vain_gets_503(tmp_path: Path, engine: FakeEngine) -> None:
    engine.healthy = False
    async with running_gateway(tmp_path, engines=[engine], hold_seconds=0.1) as gateway, gateway.client() as client:
        answer = await client.post(PATH, json=chat_body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert answer.headers["Retry-After"]


async def test_a_session_stays_on_its_engine_and_sessions_spread(tmp_path: Path) -> None:
    async with fake_engine() as one, fake_engine() as two:
        async with running_gateway(tmp_path, engines=[one, two]) as gateway, gateway.client() as client:
            await until(lambda: len(gateway.services.engines.healthy()) == 2)
            for session in range(12):
                for _ in range(3):
                    await client.post(PATH, json=chat_body(), headers={"X-Session-Id": f"s{session}"})
            turns = await gateway.recorded(36)
    homes: dict[Any, set[Any]] = {}
    for turn in turns:
        homes.setdefault(turn.evidence.value, set()).add(turn.engine_id)
    assert all(len(engines) == 1 for engines in homes.values())
    assert len(set().union(*homes.values())) == 2


async def test_a_missing_version_is_answered_by_the_active_one(tmp_path: Path, engine: FakeEngine) -> None:
    async with (
        running_gateway(tmp_path, engines=[engine], active=2, versions=frozenset({1, 2})) as gateway,
        gateway.client() as client,
    ):
        first = await client.post(PATH, json=chat_body("TOOL"))
        call = first.json()["choices"][0]["message"]
        gateway.directory.set_active(3, versions=frozenset({2, 3}))
        await until(lambda: gateway.services.directory.policy("default").active == 3)
        history = [*chat_body()["messages"][:0], {"role": "user", "content": "TOOL"}, call]
        history.append({"role": "tool", "tool_call_id": "t1", "content": "ok"})
        await client.post(PATH, json=chat_body(messages=history))
        engine.models = {"default-v3"}
        await client.post(PATH, json=chat_body(messages=history))
        await client.post(PATH, json=chat_body())
        pinned = await client.post(PATH, json=chat_body() | {"model": "default-v2"})
    turns = await gateway.recorded(4)
    assert [turn.version for turn in turns] == [2, 2, 3, 3]
    assert pinned.status_code == 404


async def test_a_silent_engine_does_not_delay_the_probes_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Far longer than `until` waits: a probe behind the silent engine's would never be seen.
    monkeypatch.setattr("clawloop.serving.chat.PROBE_TIMEOUT", aiohttp.ClientTimeout(total=600))

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def until_healthy(engines: set[str]) -> None:
        await until(lambda: gateway.services.engines.healthy() == engines)

    silent = await asyncio.start_server(never, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, fake_engine() as engine:
        engines = [engine, FakeEngine(url=f"http://127.0.0.1:{port}")]
        async with running_gateway(tmp_path, engines=engines) as gateway:
            for _ in range(2):
                await until_healthy({"e0"})
                engine.healthy = False
                await until_healthy(set())
                engine.healthy = True


async def test_a_request_waits_for_an_engine_that_lacks_the_active_version(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawloop.serving.rotation.MISSING_SECONDS", 0.3)
    async with (
        running_gateway(tmp_path, engines=[engine], active=2, versions=frozenset({2}), hold_seconds=20) as gateway,
        gateway.client() as client,
    ):
        assert (await client.post(PATH, json=chat_body())).status_code == 200
        engine.models = set()  # restarted, and its agent has not reported yet
        request = asyncio.create_task(client.post(PATH, json=chat_body()))
        await until(lambda: len(engine.requests) == 2)
        engine.models = {"default-v2"}  # loaded again
        assert (await request).status_code == 200
        engine.models = set()
        missing = await client.post(PATH, json=chat_body())
    assert missing.status_code == 503
    assert missing.headers["Retry-After"]
    assert missing.json()["error"]["code"] == "engine_unavailable"


# Chats leave a part of each engine free: what is beyond waits for its turn, or is refused.


async def test_chats_of_all_keys_leave_places_and_a_second_key_comes_next(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine], places=3) as gateway:
        engine.hold = asyncio.Event()
        async with gateway.client() as busy, gateway.client(gateway.keys.add("default", {Scope.CHAT})) as other:
            many = [asyncio.create_task(busy.post(PATH, json=chat_body(f"busy {n}"))) for n in range(8)]
            await until(lambda: len(engine.requests) == 3)
            one = asyncio.create_task(other.post(PATH, json=chat_body("other")))
            held = gateway.services.metrics.registry
            await until(lambda: held.get_sample_value("clawloop_gateway_requests_held") == 6)
            assert len(engine.requests) == 3
            engine.hold.set()
            assert {answer.status_code for answer in await asyncio.gather(*many, one)} == {200}
        sent = [request["messages"][0]["content"] for request in engine.requests]
        assert sent.index("other") == 3  # before five that came earlier
        assert len(await gateway.recorded(9)) == 9


async def test_a_request_counts_by_its_choices(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine], places=3) as gateway, gateway.client() as client:
        engine.hold = asyncio.Event()
        two = asyncio.create_task(client.post(PATH, json=chat_body(n=2)))
        await until(lambda: len(engine.requests) == 1)
        further = asyncio.create_task(client.post(PATH, json=chat_body(n=2)))
        held = gateway.services.metrics.registry
        await until(lambda: held.get_sample_value("clawloop_gateway_requests_held") == 1)
        two.cancel()  # a client that leaves gives its places back
        await until(lambda: len(engine.requests) == 2)
        engine.hold.set()
        assert (await further).status_code == 200


async def test_a_request_that_waited_is_sent_with_the_secret_of_now(tmp_path: Path, engine: FakeEngine) -> None:
    secrets = ["old"]
    async with (
        running_gateway(tmp_path, engines=[engine], places=1, secret=lambda: secrets[-1]) as gateway,
        gateway.client() as client,
    ):
        engine.hold = asyncio.Event()
        asked = [asyncio.create_task(client.post(PATH, json=chat_body())) for _ in range(2)]
        held = gateway.services.metrics.registry
        await until(lambda: held.get_sample_value("clawloop_gateway_requests_held") == 1)
        secrets.append("new")
        engine.hold.set()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
    assert engine.authorizations == ["Bearer old", "Bearer new"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_gets_no_place_is_refused_by_name_and_leaves_no_turn(
    stream: bool, tmp_path: Path, engine: FakeEngine
) -> None:
    async with (
        running_gateway(tmp_path, engines=[engine], places=1, place_seconds=0.05) as gateway,
        gateway.client() as client,
    ):
        engine.hold = asyncio.Event()
        first = asyncio.create_task(client.post(PATH, json=chat_body()))
        await until(lambda: len(engine.requests) == 1)
        refused = await client.post(PATH, json=chat_body(stream=stream))
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "engines_busy", "rate_limit_error")
        assert "`CLAWLOOP_ENGINE_CHATS`" in error["message"]
        assert int(refused.headers["Retry-After"]) > 0
        engine.hold.set()
        assert (await first).status_code == 200
        assert (await client.post(PATH, json=chat_body())).status_code == 200
        assert len(await gateway.recorded(2)) == 2


async def test_grammars_of_all_keys_together_leave_some_of_the_engine(tmp_path: Path, engine: FakeEngine) -> None:
    structured = chat_body(structured_outputs={"choice": ["a"]})
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        bound = gateway.services.limits.chat.structured_requests_together
        engine.hold = asyncio.Event()
        clients = [gateway.client(gateway.keys.add("default", {Scope.CHAT})) for _ in range(bound + 1)]
        asked = [asyncio.create_task(client.post(PATH, json=structured)) for client in clients]
        await until(lambda: len(engine.requests) == bound)
        refused, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().status_code for task in refused] == [429]
        assert len(engine.requests) == len(waiting) == bound
        engine.hold.set()
        assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}
        for client in clients:
            await client.aclose()


@pytest.mark.parametrize("with_chats", [True, False])
async def test_judges_stand_behind_chats_on_our_engines_and_other_servers_get_no_field_of_vllm(
    with_chats: bool, engine: FakeEngine
) -> None:
    def here(_: str) -> list[Endpoint]:
        return [Endpoint(engine.url, "tiny")]

    prompt, now = JudgePrompt([{"role": "user", "content": "hello"}], "mark", AnswerForm.FREE, None), time.time()
    async with JudgeClient(here, AnswerForm.FREE, with_chats=with_chats) as judge:
        await judge.answers("default", prompt, 1, 0.6)
    place = engine.requests[-1].get("priority")
    assert (place is not None) is with_chats
    if place is None:
        return
    assert now - 1 <= place // 2 - JUDGE_BEHIND <= time.time()
    assert place % 2 == 1, "which an engine on a CPU reads later than chats"


@pytest.mark.parametrize(("with_chats", "error"), [(True, JudgeUnavailable), (False, JudgeRefused)])
async def test_engines_of_ours_that_refuse_the_secret_are_asked_again_by_judges(
    with_chats: bool, error: type[ClawloopError]
) -> None:
    """While the secret is renewed another engine may have it, or this one in a moment."""
    prompt = JudgePrompt([{"role": "user", "content": "hello"}], "mark", AnswerForm.FREE, None)
    async with fake_judge() as engine:
        engine.mode = "401"
        endpoint = Endpoint(engine.url, "tiny")
        async with JudgeClient(lambda _: [endpoint], AnswerForm.FREE, with_chats=with_chats) as judge:
            with pytest.raises(error):
                await judge.answers("default", prompt, 1, 0.6)


# Engines that answer with any status, bytes or JSON: every client gets a 502 or 503 in its form, or an error event.

VERSION = {"anthropic-version": "2023-06-01"}
MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, dict[str, Any]] = {
    PATH: {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/responses": {"input": "hello"},
    "/v1/completions": {"prompt": "hello"},
}
OTHERS = [path for path in REQUESTS if path != PATH]
JSON = b"content-type: application/json\r\n"
RETRY = b"HTTP/1.1 503 Busy\r\nretry-after: 7\r\ncontent-length: 0\r\n\r\n"
ANSWERS: dict[str, tuple[bytes, int]] = {
    "500 without a body": (b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n", 502),
    "500 in HTML": (b"HTTP/1.1 500 Oops\r\ncontent-length: 13\r\n\r\n<html></html>", 502),
    "500 of bytes": (b"HTTP/1.1 500 Oops\r\ncontent-length: 4\r\n\r\n\xff\xfe\x00{", 502),
    "500 cut off": (b"HTTP/1.1 500 Oops\r\n" + JSON + b'content-length: 900\r\n\r\n{"error": {"mess', 502),
    "500 whose message is none": (
        b"HTTP/1.1 500 Oops\r\ncontent-length: 24\r\n\r\n" + b'{"error":{"message":[]}}',
        502,
    ),
    "500 in a list": (b"HTTP/1.1 500 Oops\r\ncontent-length: 3\r\n\r\n[1]", 502),
    "503 with a time": (RETRY, 503),
    "504": (b"HTTP/1.1 504 Late\r\ncontent-length: 0\r\n\r\n", 503),
    "599": (b"HTTP/1.1 599 Odd\r\ncontent-length: 0\r\n\r\n", 502),
    "a redirection": (b"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n", 502),
    "no content": (b"HTTP/1.1 204 None\r\n\r\n", 502),
    "created": (b"HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\n{}", 502),
    "reset in the head": (b"HTTP/1.1 200 OK\r\ncontent-ty", 503),
    "nothing": (b"", 503),
    "not HTTP": (b"hello\r\n\r\n", 503),
    "an empty body": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", 502),
    "a body cut off": (b"HTTP/1.1 200 OK\r\n" + JSON + b'content-length: 900\r\n\r\n{"choices": [', 502),
}


class RawEngine(FakeEngine):
    """Answers each request with the same bytes, and closes the connection."""

    answer: bytes = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /health"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            else:
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.split(b":")[1]))
                # Said, so that the gateway does not send its next request on a connection that is being closed.
                writer.write(self.answer.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway was stopped
        finally:
            writer.close()


@asynccontextmanager
async def raw_gateway(folder: Path) -> AsyncIterator[tuple[Gateway, RawEngine]]:
    engine = RawEngine()
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    async with server:
        engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with running_gateway(folder, engines=[engine]) as gateway:
            await until(gateway.services.engines.healthy)
            yield gateway, engine


def check_error(answer: httpx.Response, path: str, status: int) -> dict[str, Any]:
    assert answer.status_code == status, (path, answer.text)
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == error_fields(path)
    assert ("retry-after" in answer.headers) == (status == 503)
    return error


async def test_an_engine_that_fails_in_any_way_is_502_or_503(tmp_path: Path) -> None:
    async with raw_gateway(tmp_path) as (gateway, engine), gateway.client() as client:
        for number, (name, (raw, status)) in enumerate(ANSWERS.items()):
            engine.answer = raw
            # Every way on one path, and each of the other paths in turn.
            for path, stream in ((PATH, False), (PATH, True), (OTHERS[number % 3], number % 2 == 0)):
                given = REQUESTS[path] | {"model": "policy", "stream": stream}
                answer = await client.post(path, json=given, headers=VERSION if path == "/v1/messages" else {})
                error = check_error(answer, path, status)
                assert "Internal error" not in error["message"], (name, path)
        engine.answer = RETRY
        busy = await client.post(PATH, json=chat_body())
        counted = await client.post("/v1/responses/input_tokens", json={"model": "policy", "input": "hello"})
        assert (busy.headers["retry-after"], check_error(counted, PATH, 503)["code"]) == ("7", "engine_unavailable")
        turns = await gateway.recorded(3 * len(ANSWERS) + 1)
    assert {turn.status for turn in turns} == {TurnStatus.ERROR}


TEXTS: st.SearchStrategy[Any] = st.sampled_from(("stop", "tool_calls", "abort", "function", "x", ""))
SCALARS: st.SearchStrategy[Any] = st.none() | st.booleans() | st.sampled_from((0, 1, -1, 0.5, 2**63)) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2))


def one_with(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries({}, optional={name: value | VALUES for name, value in fields.items()})


FUNCTION = one_with({"name": TEXTS, "arguments": TEXTS})
CALLS = st.lists(one_with({"index": st.integers(0, 2), "id": TEXTS, "type": TEXTS, "function": FUNCTION}), max_size=2)
SAID = one_with({"role": TEXTS, "content": TEXTS, "reasoning": TEXTS, "refusal": TEXTS, "tool_calls": CALLS})
LOGPROBS = one_with(
    {
        "content": st.lists(one_with({"logprob": st.floats(-5, 0)}), max_size=2),
        "token_logprobs": st.lists(st.floats(-5, 0), max_size=2),
    }
)
CHOICES = st.lists(
    st.fixed_dictionaries(
        {"index": st.just(0) | VALUES},
        optional={
            "delta": SAID | VALUES,
            "message": SAID | VALUES,
            "text": VALUES,
            "finish_reason": VALUES,
            "logprobs": LOGPROBS | VALUES,
            "token_ids": st.lists(st.integers(0, 9), max_size=2) | VALUES,
            "stop_reason": VALUES,
        },
    ),
    max_size=2,
)
DETAILS = one_with({"cached_tokens": st.integers(0, 9), "reasoning_tokens": st.integers(0, 9)})
USAGE = one_with({"prompt_tokens": st.integers(), "prompt_tokens_details": DETAILS, "total_tokens": st.integers()})
OBJECTS = st.fixed_dictionaries(
    {"choices": CHOICES | VALUES},
    optional={"usage": USAGE | VALUES, "model": VALUES, "prompt_token_ids": VALUES, "error": VALUES},
)


@pytest.fixture(scope="module")
def gateway_in_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_thread(tmp_path_factory.mktemp("shapes")) as (_, gateway):
        yield gateway


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("path", REQUESTS)
def test_an_answer_of_any_shape_is_passed_on_or_502(gateway_in_thread: Gateway, path: str, examples: int) -> None:
    key = {"Authorization": f"Bearer {gateway_in_thread.key}"}
    given_to = REQUESTS[path] | {"model": "policy"}
    with httpx.Client(base_url=gateway_in_thread.url, headers=key | VERSION, timeout=120) as client:

        @given(said=OBJECTS | VALUES)
        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        def check(said: Any) -> None:
            gateway_in_thread.engine.verbatim = orjson.dumps(said)
            answer = client.post(path, json=given_to)
            assert answer.status_code in (200, 502), answer.text

        check()


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("path", REQUESTS)
def test_a_stream_of_any_shape_ends_or_ends_in_an_error(gateway_in_thread: Gateway, path: str, examples: int) -> None:
    key = {"Authorization": f"Bearer {gateway_in_thread.key}"}
    given_to = REQUESTS[path] | {"model": "policy", "stream": True}
    with httpx.Client(base_url=gateway_in_thread.url, headers=key | VERSION, timeout=120) as client:

        @given(said=st.lists(OBJECTS | VALUES, max_size=3), done=st.booleans())
        @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        def check(said: list[Any], done: bool) -> None:
            events = [b"data: " + orjson.dumps(one) + b"\n\n" for one in said]
            gateway_in_thread.engine.verbatim = b"".join(events) + (b"data: [DONE]\n\n" if done else b"")
            answer = client.post(path, json=given_to)
            assert answer.status_code in (200, 502), answer.text
            if answer.status_code == 200:
                assert is_ended(answer.text), answer.text

        check()


def is_ended(text: str) -> bool:
    """Whether a client can tell that the stream is whole, or that it failed."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    if data[-1] == "[DONE]":
        return True
    last = orjson.loads(data[-1])
    return "error" in last or last.get("type") in (
        "message_stop",
        "response.completed",
        "response.incomplete",
        "response.failed",
    )


# What a model name stands for.

POLICY = Policy("default", "Qwen/Qwen3-4B", ("qwen3-4b",), 7, {}, kept=frozenset({5, 7}))


@pytest.mark.parametrize(
    ("name", "choice"),
    [
        ("policy", ModelChoice(None, side=False)),
        ("qwen3-4b", ModelChoice(None, side=False)),
        ("policy-side", ModelChoice(None, side=True)),
        ("default-v7", ModelChoice(7, side=False)),
        ("default-v5", ModelChoice(5, side=False)),
        ("default-v0", ModelChoice(0, side=False)),
        ("Qwen/Qwen3-4B", ModelChoice(0, side=False)),
    ],
)
def test_a_name_stands_for_a_version_or_the_active_one(name: str, choice: ModelChoice) -> None:
    assert resolve_name(name, POLICY) == choice


def test_the_active_version_exists_while_no_engine_has_it() -> None:
    assert resolve_name("default-v7", replace(POLICY, kept=frozenset())) == ModelChoice(7, side=False)


async def test_a_kept_version_that_no_engine_has_is_loaded_when_it_is_named(tmp_path: Path) -> None:
    async with (
        fake_engine() as engine,
        running_gateway(
            tmp_path, engines=[engine], active=7, versions=frozenset({7}), unloaded=frozenset({5, 6})
        ) as gateway,
        gateway.client() as client,
    ):
        listed = (await client.get("/v1/models", params={"versions": True})).json()["data"]
        named = [model["id"] for model in listed if "-v" in model["id"]]
        assert named == ["default-v0", "default-v5", "default-v6", "default-v7"]
        for path, asked in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
            ("/v1/completions", {"prompt": "Once upon"}),
        ):
            for n in (5, 6, 0, 7):
                answer = await client.post(path, json=asked | {"model": f"default-v{n}"})
                assert (answer.status_code, answer.headers["x-clawloop-version"]) == (200, str(n))
        assert (await client.post(path, json=asked | {"model": "default-v4"})).status_code == 404


def test_the_base_models_name_may_be_an_alias() -> None:
    policy = Policy("default", "qwen3-4b", ("qwen3-4b",), 7, {})
    assert resolve_name("qwen3-4b", policy) == ModelChoice(None, side=False)


@pytest.mark.parametrize("name", ["", "gpt-4", "default-v8", "default-v6", "other-v7", "Qwen/Qwen3-4B-side"])
def test_other_names_are_refused_with_a_list_of_aliases(name: str) -> None:
    with pytest.raises(RequestRejected, match="`policy` or `qwen3-4b`") as raised:
        resolve_name(name, POLICY)
    assert raised.value.status == 404


# Who gets a canary: a share of the conversations, each of them every time.

KEY = ApiKeyId(UUID(int=5))
EVIDENCE = SessionEvidence(SessionSource.HEADER, "s")
WITH_CANARY = Policy("default", "tiny", (), 3, {}, canary=4, canary_share=0.25)


async def test_a_share_of_the_conversations_gets_the_canary_and_keeps_it() -> None:
    chooser = VersionChooser(FakeTurnStore())
    messages: list[Message] = [{"role": "user", "content": "Hello"}]

    async def version(conversation: int, policy: Policy) -> int:
        return await chooser.choose(KEY, policy, EVIDENCE, messages, f"{KEY}/{conversation}")

    chosen = [await version(conversation, WITH_CANARY) for conversation in range(400)]
    assert set(chosen) == {3, 4}
    assert 0.15 < chosen.count(4) / 400 < 0.35
    assert chosen == [await version(conversation, WITH_CANARY) for conversation in range(400)]
    ended = Policy("default", "tiny", (), 3, {})
    assert {await version(conversation, ended) for conversation in range(400)} == {3}
