"""Whatever is killed, a turn that a client received completely is in PostgreSQL once, with its parent."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from clawloop.app.local.checks import choose_port
from clawloop.app.local.services.postgres import EmbeddedPostgres
from clawloop.core.ids import TurnId, turn_id_of
from db.database import BACKGROUND_LIMIT, Database
from db.turns.insert import PostgresTurnStore
from tests.e2e.gateway import RealGateway, prepared, running_gateway
from tests.fakes.engine import FakeEngine, fake_engine

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

PATH = "/v1/chat/completions"


@dataclass
class Chatters:
    """Clients that chat until stopped, each in a session of its own.

    Attributes:
        acknowledged: per session, the response ids whose end a client saw, in order.
        failed: answers that did not come to their end.
    """

    gateway: RealGateway
    acknowledged: dict[str, list[str]] = field(default_factory=dict)
    failed: int = 0
    stop: bool = False

    async def chat(self, session: str) -> None:
        history: list[dict[str, Any]] = []
        turns = self.acknowledged.setdefault(session, [])
        async with self.gateway.client(timeout=60) as client:
            number = 0
            while not self.stop:
                number += 1
                messages = [*history, {"role": "user", "content": f"{session} question {number}"}]
                body = {"model": "policy", "messages": messages, "stream": True}
                try:
                    answer = await client.post(PATH, json=body, headers={"X-Session-Id": session})
                except httpx.TransportError:
                    self.failed += 1
                    await asyncio.sleep(0.05)
                    continue
                if answer.status_code != 200 or not answer.text.endswith("data: [DONE]\n\n"):
                    self.failed += 1
                    await asyncio.sleep(0.05)
                    continue
                chunks = [orjson.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
                text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
                turns.append(chunks[0]["id"])
                history = [*messages, {"role": "assistant", "content": text}]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with fake_engine() as running:
        running.delay_seconds = 0.01
        yield running


async def test_killed_gateways_lose_no_acknowledged_turn(postgres_url: str, engine: FakeEngine, tmp_path: Path) -> None:
    keys = await prepared(postgres_url, [engine.url])
    port = choose_port("the gateway", "127.0.0.1", 0, "")
    chatters: Chatters | None = None
    tasks: list[asyncio.Task[None]] = []
    for _ in range(3):
        async with running_gateway(postgres_url, keys, tmp_path, port) as gateway:
            if chatters is None:
                chatters = Chatters(gateway)
                tasks = [asyncio.create_task(chatters.chat(f"s{n}")) for n in range(6)]
            await _more_turns(chatters, 30)
            gateway.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(gateway.process.wait)
    assert chatters is not None
    async with running_gateway(postgres_url, keys, tmp_path, port):
        await _more_turns(chatters, 12)
        chatters.stop = True
        await asyncio.gather(*tasks)
        await _everything_stands(chatters, postgres_url)
    assert chatters.failed > 0


async def test_a_killed_postgres_fails_no_chat_and_loses_no_turn(engine: FakeEngine, tmp_path: Path) -> None:
    postgres = EmbeddedPostgres(tmp_path / "postgres")
    server = await asyncio.to_thread(_started, postgres)
    keys = await prepared(postgres.url, [engine.url])
    async with running_gateway(postgres.url, keys, tmp_path / "gateway") as gateway:
        chatters = Chatters(gateway)
        tasks = [asyncio.create_task(chatters.chat(f"s{n}")) for n in range(6)]
        await _more_turns(chatters, 30)
        for _ in range(2):
            server.send_signal(signal.SIGKILL)
            await asyncio.to_thread(server.wait)
            await _more_turns(chatters, 60)
            server = await asyncio.to_thread(_started, postgres)
            await _more_turns(chatters, 30)
        chatters.stop = True
        await asyncio.gather(*tasks)
        try:
            await _everything_stands(chatters, postgres.url)
        finally:
            server.send_signal(signal.SIGINT)
            await asyncio.to_thread(server.wait)
    assert chatters.failed == 0


def _started(postgres: EmbeddedPostgres) -> Any:
    process = postgres.prepare().popen()
    postgres.wait_ready(120, lambda: process.poll() is None)
    return process


async def _more_turns(chatters: Chatters, count: int) -> None:
    """Until this many more were acknowledged."""
    goal = _acknowledged(chatters) + count
    async with asyncio.timeout(240):
        while _acknowledged(chatters) < goal:
            await asyncio.sleep(0.02)


def _acknowledged(chatters: Chatters) -> int:
    return sum(len(turns) for turns in chatters.acknowledged.values())


async def _everything_stands(chatters: Chatters, url: str) -> None:
    """Each acknowledged turn is there, and its parent is the acknowledged turn before it."""
    async with chatters.gateway.client() as client, asyncio.timeout(240):
        while "clawloop_gateway_spool_turns 0.0" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.1)
    database = Database(url, BACKGROUND_LIMIT)
    store = PostgresTurnStore(database)
    try:
        for turns in chatters.acknowledged.values():
            before = None
            for response in turns:
                stored = await store.load(_turn_id(response))
                assert stored is not None, f"{response} was acknowledged and is lost"
                assert stored.parent_turn_id == before
                assert len(stored.record.response_ids or ()) == 6
                before = stored.record.turn_id
    finally:
        await database.close()


def _turn_id(response: str) -> TurnId:
    turn_id = turn_id_of(response)
    assert turn_id is not None
    return turn_id
