"""Engines that answer with any status, bytes or JSON: every client gets a 502 or 503 in its form, or an error event."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clawloop.core.contracts.turns import TurnStatus
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.api.gateway_thread import gateway_thread
from tests.api.test_any_shape import EXAMPLES, error_fields
from tests.fakes.engine import FakeEngine

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
