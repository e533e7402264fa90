"""Clients that leave, servers that stop, stores that misbehave, all at awkward moments: no turn is lost."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
import pytest
from starlette.datastructures import Headers

from api.chat import stream
from api.chat.request import prepare
from clawloop.contracts.serving import Scope
from clawloop.contracts.turns import InsertedTurn, TurnRecord, TurnStatus
from tests.api.conftest import Gateway, running_gateway
from tests.api.test_chat import IDS, ask
from tests.fakes.engine import FakeEngine
from tests.fakes.turn_store import FakeTurnStore

PATH = "/v1/chat/completions"


class SlowStore(FakeTurnStore):
    """Takes its time, and can be told to fail as nobody expects."""

    bug = False

    def __init__(self) -> None:
        super().__init__()
        self.entering = asyncio.Event()

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        self.entering.set()
        await asyncio.sleep(0.2)
        if self.bug:
            raise ZeroDivisionError("on purpose")
        return await super().insert(record)


def _use(gateway: Gateway, store: FakeTurnStore) -> None:
    gateway.turns = store
    gateway.services.recorder._store = gateway.services.recorder._background_store = store


async def _leave_while_storing(gateway: Gateway, body: dict[str, Any]) -> None:
    store = SlowStore()
    _use(gateway, store)
    async with gateway.client() as client:
        asking = asyncio.create_task(client.post(PATH, json=body))
        await asyncio.wait_for(store.entering.wait(), 30)
        asking.cancel()
        await asyncio.wait({asking})


@pytest.mark.slow
async def test_a_client_that_stops_reading_gives_its_place_in_the_engine_back(
    tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(stream, "STALL_CHECK_SECONDS", 0.1)
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        address = urlsplit(gateway.url)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((address.hostname, address.port))
            body = orjson.dumps(ask("ENDLESS", stream=True))
            head = f"POST {PATH} HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {gateway.key}\r\n"
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            (turn,) = await gateway.recorded(1)
            assert turn.status is TurnStatus.ABORTED
            assert len(turn.response_ids or []) > 1
            async with asyncio.timeout(30):
                while not engine.aborted:
                    await asyncio.sleep(0.01)
        # Another one is answered as ever, however slowly it is read.
        async with gateway.client() as well:
            assert (await well.post(PATH, json=ask(stream=True))).text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
async def test_a_stop_with_a_stream_open_keeps_what_was_made(tmp_path: Path, engine: FakeEngine) -> None:
    engine.delay_seconds = 0.2
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        _use(gateway, SlowStore())

        async def chat() -> None:
            async with gateway.client() as client:
                await client.post(PATH, json=ask(stream=True), timeout=30)

        engine.delay_seconds = 3.0
        chatting = asyncio.create_task(chat())
        async with asyncio.timeout(30):
            while not engine.requests:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
    with pytest.raises(httpx.TransportError):
        await chatting
    [turn] = gateway.turns.records
    assert turn.status is TurnStatus.ABORTED


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_that_ended_are_whole_even_if_the_client_leaves_while_they_are_stored(
    fresh_gateway: Gateway, stream: bool
) -> None:
    await _leave_while_storing(fresh_gateway, ask(n=3, stream=stream))
    turns = await fresh_gateway.recorded(3)
    assert {turn.choice for turn in turns} == {0, 1, 2}
    assert all(turn.response_ids == IDS for turn in turns if turn.status is TurnStatus.COMPLETE)
    if not stream:
        assert {turn.status for turn in turns} == {TurnStatus.COMPLETE}


async def test_choices_of_a_broken_stream_are_all_kept_even_if_the_client_leaves(fresh_gateway: Gateway) -> None:
    await _leave_while_storing(fresh_gateway, ask("BREAK", n=2, stream=True))
    turns = await fresh_gateway.recorded(2)
    assert {turn.status for turn in turns} == {TurnStatus.ERROR}


async def test_a_store_with_a_bug_costs_neither_the_chat_nor_the_turn(fresh_gateway: Gateway) -> None:
    store = SlowStore()
    store.bug = True
    _use(fresh_gateway, store)
    async with fresh_gateway.client() as client:
        for word in ("one", "two"):
            answer = await client.post(PATH, json=ask(word, stream=True))
            assert answer.text.endswith("data: [DONE]\n\n")
        assert fresh_gateway.spool.turns == 2
        store.bug = False
        turns = await fresh_gateway.recorded(2)
    assert [turn.messages[0]["content"] for turn in turns] == ["one", "two"]


async def test_a_spooled_file_that_vanishes_holds_up_nothing(fresh_gateway: Gateway, tmp_path: Path) -> None:
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=ask("warm"))
        fresh_gateway.turns.available = False
        for word in ("gone", "kept"):
            await client.post(PATH, json=ask(word))
        oldest = min((tmp_path / "spool").glob("*/*.json"))
        oldest.unlink()
        fresh_gateway.turns.available = True
        turns = await fresh_gateway.recorded(2)
    assert [turn.messages[0]["content"] for turn in turns] == ["warm", "kept"]


async def test_the_deepest_body_that_is_taken_survives_the_spool(fresh_gateway: Gateway) -> None:
    deep: Any = "x"
    for _ in range(120):
        deep = [deep]
    body = orjson.dumps(ask() | {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"d": deep}}}]})
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=ask("warm"))
        fresh_gateway.turns.available = False
        assert (await client.post(PATH, content=body)).status_code == 200
        assert fresh_gateway.spool.turns == 1
        fresh_gateway.turns.available = True
        turns = await fresh_gateway.recorded(2)
    assert turns[1].tools == orjson.loads(body)["tools"]


async def test_every_answer_is_counted_wherever_it_was_decided(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=ask())
        await client.post(PATH, json={})
        await client.post(PATH, json=ask() | {"model": "nobody"})
        metrics = (await client.get("/metrics")).text
    for status in ("200", "400", "404"):
        assert f'clawloop_gateway_requests_total{{status="{status}"}} 1.0' in metrics


async def test_a_conversation_without_a_system_prompt_keeps_its_affinity(fresh_gateway: Gateway) -> None:
    bearer = Headers({"authorization": f"Bearer {fresh_gateway.key}"})
    key = await fresh_gateway.services.keys.require(bearer, Scope.CHAT)
    history: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    seen = set()
    for _ in range(3):
        chat = await prepare(fresh_gateway.services, key, Headers(), ask(messages=list(history)))
        seen.add(chat.affinity)
        history += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
    assert len(seen) == 1
