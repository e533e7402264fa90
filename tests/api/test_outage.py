"""PostgreSQL away: chat goes on from what is remembered, turns wait on disk and are entered later, in order."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from clawloop.contracts.turns import InsertedTurn, TurnRecord
from clawloop.errors import RecordUnusable
from tests.api.conftest import Gateway, running_gateway
from tests.api.test_chat import ask
from tests.fakes.engine import FakeEngine
from tests.fakes.turn_store import FakeTurnStore

PATH = "/v1/chat/completions"


def _postgres(gateway: Gateway, *, available: bool) -> None:
    gateway.turns.available = gateway.keys.available = gateway.directory.available = available


@pytest.mark.slow
async def test_chat_goes_on_and_turns_are_entered_when_postgres_is_back(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=ask("before"))
        _postgres(fresh_gateway, available=False)
        for n in range(5):
            assert (await client.post(PATH, json=ask(f"away {n}", stream=True))).status_code == 200
        assert fresh_gateway.spool.turns == 5
        metrics = (await client.get("/metrics")).text
        assert "clawloop_gateway_spool_turns 5.0" in metrics
        _postgres(fresh_gateway, available=True)
        turns = await fresh_gateway.recorded(6)
        async with asyncio.timeout(30):
            while fresh_gateway.spool.turns:
                await asyncio.sleep(0.01)
    said = [turn.messages[0]["content"] for turn in turns]
    assert said == ["before", *(f"away {n}" for n in range(5))]


@pytest.mark.slow
async def test_a_turn_never_overtakes_those_that_wait(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=ask("warm"))
        _postgres(fresh_gateway, available=False)
        await client.post(PATH, json=ask("first"))
        _postgres(fresh_gateway, available=True)
        await client.post(PATH, json=ask("second"))
        turns = await fresh_gateway.recorded(3)
    assert [turn.messages[0]["content"] for turn in turns] == ["warm", "first", "second"]


async def test_what_waits_on_disk_is_entered_by_the_next_process(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine]) as gateway, gateway.client() as client:
        await client.post(PATH, json=ask("warm"))
        _postgres(gateway, available=False)
        await client.post(PATH, json=ask("away"))
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        [turn] = await gateway.recorded()
    assert turn.messages[0]["content"] == "away"


async def test_a_key_nobody_remembers_cannot_be_checked_and_that_is_no_401(fresh_gateway: Gateway) -> None:
    _postgres(fresh_gateway, available=False)
    async with fresh_gateway.client() as client:
        answer = await client.post(PATH, json=ask())
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    assert answer.json()["error"]["code"] == "store_unavailable"


async def test_a_full_spool_loses_the_newest_turn_counts_it_and_chats_on(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine], spool_bytes=2500) as gateway, gateway.client() as client:
        await client.post(PATH, json=ask("warm"))
        _postgres(gateway, available=False)
        for _ in range(4):
            assert (await client.post(PATH, json=ask())).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 0 < gateway.spool.turns < 4
    assert f'clawloop_gateway_turns_lost_total{{why="spool full"}} {4 - gateway.spool.turns}.0' in metrics


class PoisonStore(FakeTurnStore):
    """Refuses one turn for ever."""

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        if record.messages[0]["content"] == "poison":
            raise RecordUnusable("on purpose")
        return await super().insert(record)


async def test_a_turn_that_can_never_be_entered_is_set_aside_and_blocks_nothing(
    fresh_gateway: Gateway, tmp_path: Path
) -> None:
    fresh_gateway.services.recorder._store = fresh_gateway.services.recorder._background_store = store = PoisonStore()
    async with fresh_gateway.client() as client:
        assert (await client.post(PATH, json=ask("poison"))).status_code == 200
        assert (await client.post(PATH, json=ask("fine"))).status_code == 200
    assert [record.messages[0]["content"] for record in store.records] == ["fine"]
    assert len(list((tmp_path / "spool").glob("*/rejected/*.json"))) == 1


async def test_health_says_what_is_wrong(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert "clawloop_gateway_requests_in_flight" in (await client.get("/metrics")).text


async def test_logs_carry_ids_and_never_content(fresh_gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with fresh_gateway.client() as client:
            await client.post(PATH, json=ask("very-private-words"))
            await client.post(PATH, json=ask("BREAK", stream=True))
    ours = [record for record in caplog.records if record.name.startswith(("api", "clawloop"))]
    assert any(getattr(record, "turn_id", None) for record in ours)
    said = " ".join(str(record.__dict__) for record in ours)
    assert "very-private" not in said
    assert "Hello" not in said
    assert fresh_gateway.key not in said
