"""Clients that disconnect, servers that stop and stores that fail, each at the worst moment: no turn is lost."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest

from api.chat import key_limits, stream
from api.dependencies import Limits
from clawloop.core.contracts.turns import InsertedTurn, TurnRecord, TurnStatus
from clawloop.core.settings import ChatBounds
from tests.api.chat_requests import IDS, PATH, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import FakeEngine
from tests.fakes.turn_store import FakeTurnStore


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
