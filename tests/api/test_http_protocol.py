"""The head of an HTTP request is bounded in bytes, lines and time, whatever comes before or after it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress

import pytest

import api.http_protocol
from api.http_protocol import HEAD_BYTES, HEAD_LINES
from tests.api.conftest import Gateway

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


async def _send(gateway: Gateway, *parts: bytes, close: bool = False) -> bytes:
    """What the gateway answers until it closes the connection."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            writer.write_eof()
        async with asyncio.timeout(30):
            return await reader.read()
    except ConnectionResetError:  # it closed while more was being sent
        return b""
    finally:
        writer.close()


def _status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def _code(answer: bytes) -> str:
    code: str = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"]
    return code


@pytest.mark.parametrize(
    "head",
    [
        GET + b"X-Large: " + b"x" * HEAD_BYTES,
        b"GET /" + b"x" * HEAD_BYTES,
        GET + b"".join(b"X-%d: 1\r\n" % n for n in range(HEAD_LINES)) + b"\r\n",
        GET + b"a:\r\n" * (HEAD_BYTES // 8) + b"\r\n",
    ],
    ids=["one large header", "a long address", "many headers", "empty headers"],
)
async def test_a_large_head_is_431(gateway: Gateway, head: bytes) -> None:
    answer = await _send(gateway, head)
    assert (_status(answer), _code(answer)) == (431, "headers_too_large")


async def test_a_flood_of_headers_is_cut_off(gateway: Gateway) -> None:
    await _send(gateway, GET + b"X-Large: ", *[b"x" * 65_536] * 100)
    async with gateway.client() as client:
        assert (await client.get("/healthz")).status_code == 200


async def test_a_head_of_the_largest_size_is_served(gateway: Gateway) -> None:
    line, end = GET + b"Connection: close\r\nX-Large: ", b"\r\n\r\n"
    answer = await _send(gateway, line + b"x" * (HEAD_BYTES - len(line + end)) + end)
    assert _status(answer) == 200


async def test_as_many_headers_as_allowed_are_served(gateway: Gateway) -> None:
    more = b"".join(b"X-%d: 1\r\n" % n for n in range(HEAD_LINES - 2))
    assert _status(await _send(gateway, GET + more + b"Connection: close\r\n\r\n")) == 200


async def test_a_body_is_not_counted_and_neither_is_the_request_before(gateway: Gateway) -> None:
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "x" * 3 * HEAD_BYTES}]}).encode()
    chat = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + gateway.key.encode()
    chat += b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    padded = GET + b"X-Large: " + b"x" * (HEAD_BYTES // 2) + b"\r\n\r\n"
    answer = await _send(gateway, chat + body + padded + padded + GET + b"Connection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 4


async def test_a_head_that_arrives_slowly_is_408(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.http_protocol, "HEAD_SECONDS", 0.1)
    for parts in ([GET], [], [b"\r\n"], [GET + b"\r\n", GET]):
        answer = await _send(gateway, *parts)
        assert answer.endswith(b'"code":"upload_timeout"}}'), parts


async def test_a_slow_second_head_does_not_cut_the_first_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.http_protocol, "HEAD_SECONDS", 0.05)
    gateway.engine.delay_seconds = 0.05
    body = json.dumps({"model": "policy", "stream": True, "messages": [{"role": "user", "content": "x"}]}).encode()
    chat = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + gateway.key.encode()
    chat += b"\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = await _send(gateway, chat, body + b"\r\n")
    assert b"[DONE]" in answer


async def test_a_flood_behind_a_body_is_cut_off(gateway: Gateway) -> None:
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    sent = 0
    with suppress(ConnectionError):
        host, port = gateway.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(post + b"0\r\nX-Trailer: ")
        for _ in range(200):
            writer.write(b"x" * 65_536)
            await writer.drain()
            sent += 1
    assert sent < 200


async def test_a_body_that_never_ends_is_closed_after_its_answer(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.http_protocol, "HEAD_SECONDS", 0.1)
    post = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    answer = await _send(gateway, post, b"x")  # without a key; returns once the connection is closed
    assert _status(answer) == 401


async def test_what_is_not_http_is_400(gateway: Gateway) -> None:
    answer = await _send(gateway, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello")
    assert (_status(answer), _code(answer)) == (400, "invalid_http")


async def test_two_host_headers_are_400(gateway: Gateway) -> None:
    answer = await _send(gateway, GET + b"Host: evil.example\r\nConnection: close\r\n\r\n")
    assert (_status(answer), _code(answer)) == (400, "invalid_http")


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_takes_nothing_of_its_answers_is_cut_off(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setattr(api.http_protocol, "STALLED_SECONDS", 2.0)
    host, port = gateway.url.removeprefix("http://").split(":")
    many = 200  # 50 MB of answers: more than the kernel keeps for a connection, and 4 s with the pauses
    with socket.socket() as client:
        client.settimeout(20)
        client.connect((host, int(port)))
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * many)
        await asyncio.sleep(0 if reads else 6)
        received = await asyncio.to_thread(_answers, client, many, 0.02 if reads else 0)
    assert (received == many) is reads


def _answers(client: socket.socket, most: int, pause_seconds: float) -> int:
    """How many answers begin before the connection ends, or so many have."""
    begin = b"HTTP/1.1 200 OK"
    begun, rest = 0, b""
    with suppress(ConnectionResetError):
        while begun < most and (data := client.recv(2**18)):
            begun += (rest + data).count(begin)
            rest = (rest + data)[1 - len(begin) :]
            time.sleep(pause_seconds)
    return begun
