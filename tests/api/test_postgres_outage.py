"""PostgreSQL away: chat goes on from caches; turns are spooled, and stored later in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from api.recording.insert_queue import DRAIN_BATCH_TURNS
from clawloop.core.contracts.turns import InsertedTurn, TurnRecord
from clawloop.core.errors import RecordUnusable
from clawloop.core.settings import WhenStorageIsFull
from tests.api.chat_requests import PATH, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import FakeEngine
from tests.fakes.turn_store import FakeTurnStore


def _set_postgres(gateway: Gateway, *, available: bool) -> None:
    gateway.turns.available = gateway.keys.available = gateway.directory.available = available


async def test_chat_goes_on_and_turns_are_stored_when_postgres_is_back(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        await client.post(PATH, json=chat_body("before"))
        _set_postgres(fresh_gateway, available=False)
        for n in range(5):
            assert (await client.post(PATH, json=chat_body(f"away {n}", stream=True))).status_code == 200
        assert fresh_gateway.spool.turns == 5
        metrics = (await client.get("/metrics")).text
        assert "clawloop_gateway_spool_turns 5.0" in metrics
        _set_postgres(fresh_gateway, available=True)
        turns = await fresh_gateway.recorded(6)
        await until(lambda: not fresh_gateway.spool.turns)
    contents = [turn.messages[0]["content"] for turn in turns]
    assert contents == ["before", *(f"away {n}" for n in range(5))]


async def test_spooled_turns_are_stored_by_the_next_process(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine]) as gateway, gateway.client() as client:
        await client.post(PATH, json=chat_body("warm"))
        _set_postgres(gateway, available=False)
        await client.post(PATH, json=chat_body("away"))
    async with running_gateway(tmp_path, engines=[engine]) as gateway:
        [turn] = await gateway.recorded()
    assert turn.messages[0]["content"] == "away"


async def test_an_uncached_key_is_503_not_401(fresh_gateway: Gateway) -> None:
    _set_postgres(fresh_gateway, available=False)
    async with fresh_gateway.client() as client:
        answer = await client.post(PATH, json=chat_body())
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    assert answer.json()["error"]["code"] == "store_unavailable"


async def test_turns_wait_in_memory_beyond_the_spool_and_are_stored_later(tmp_path: Path, engine: FakeEngine) -> None:
    async with running_gateway(tmp_path, engines=[engine], spool_bytes=2500) as gateway, gateway.client() as client:
        await client.post(PATH, json=chat_body("warm"))
        _set_postgres(gateway, available=False)
        for text in "abcd":
            assert (await client.post(PATH, json=chat_body(text))).status_code == 200
        held = 4 - gateway.spool.turns
        assert 0 < held < 4
        assert f"clawloop_gateway_held_turns {held}.0" in (await client.get("/metrics")).text
        _set_postgres(gateway, available=True)
        turns = await gateway.recorded(5)
        assert not _lost((await client.get("/metrics")).text)
    assert sorted(str(turn.messages[0]["content"]) for turn in turns) == ["a", "b", "c", "d", "warm"]


async def test_a_turn_that_fits_nowhere_is_lost_and_counted(tmp_path: Path, engine: FakeEngine) -> None:
    async with (
        running_gateway(tmp_path, engines=[engine], spool_bytes=2500, held_bytes=100) as gateway,
        gateway.client() as client,
    ):
        await client.post(PATH, json=chat_body("warm"))
        _set_postgres(gateway, available=False)
        for _ in range(4):
            assert (await client.post(PATH, json=chat_body())).status_code == 200
        metrics = (await client.get("/metrics")).text
    assert 0 < gateway.spool.turns < 4
    assert f'clawloop_gateway_turns_lost_total{{why="spool full"}} {4 - gateway.spool.turns}.0' in metrics


async def test_an_operator_may_have_chats_refused_that_would_not_be_recorded(
    tmp_path: Path, engine: FakeEngine
) -> None:
    starting = running_gateway(
        tmp_path, engines=[engine], spool_bytes=0, held_bytes=4000, when_full=WhenStorageIsFull.REFUSE
    )
    async with starting as gateway, gateway.client() as client:
        await client.post(PATH, json=chat_body("warm"))
        _set_postgres(gateway, available=False)
        answers = [await client.post(PATH, json=chat_body(text)) for text in "abcdef"]
        refused = [answer for answer in answers if answer.status_code == 503]
        metrics = (await client.get("/metrics")).text
        asked = len(engine.requests)
        _set_postgres(gateway, available=True)
        turns = await gateway.recorded(1 + len(answers) - len(refused))
        async with asyncio.timeout(30):  # memory is free a moment after PostgreSQL has the turns
            while (again := await client.post(PATH, json=chat_body("again"))).status_code == 503:
                await asyncio.sleep(0.01)
    assert 0 < len(refused) < len(answers)
    assert asked == 1 + len(answers) - len(refused)  # no engine computes what is refused
    assert refused[0].json()["error"]["code"] == "recording_unavailable"
    assert refused[0].headers["Retry-After"] == "5"
    assert not _lost(metrics)
    assert len(turns) == 1 + len(answers) - len(refused)
    assert again.status_code == 200


class PoisonStore(FakeTurnStore):
    """Refuses one turn permanently, and has a bug with another."""

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        if self.available and record.messages[0]["content"] == "poison":
            raise RecordUnusable("on purpose")
        if self.available and record.messages[0]["content"] == "bug":
            raise RuntimeError("on purpose")
        return await super().insert(record)

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        results = await super().insert_many(records)
        for result in results:
            if isinstance(result, RuntimeError):
                raise result
        return results


async def test_a_turn_that_can_never_be_stored_is_rejected_and_blocks_nothing(
    fresh_gateway: Gateway, tmp_path: Path
) -> None:
    recorder, store = fresh_gateway.services.recorder, PoisonStore()
    recorder._inserts._store = recorder._drain._store = store
    async with fresh_gateway.client() as client:
        assert (await client.post(PATH, json=chat_body("poison"))).status_code == 200
        assert (await client.post(PATH, json=chat_body("fine"))).status_code == 200
    assert [record.messages[0]["content"] for record in store.records] == ["fine"]
    assert len(list((tmp_path / "spool").glob("*/rejected/*.json"))) == 1


async def test_health_readiness_and_metrics_are_served(fresh_gateway: Gateway) -> None:
    async with fresh_gateway.client() as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        ready = await client.get("/readyz")
        assert (ready.status_code, ready.json()["status"]) == (200, "ready")
        assert "clawloop_gateway_requests_in_flight" in (await client.get("/metrics")).text


async def test_logs_carry_ids_and_never_content(fresh_gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with fresh_gateway.client() as client:
            await client.post(PATH, json=chat_body("very-private-words"))
            await client.post(PATH, json=chat_body("BREAK", stream=True))
    records = [record for record in caplog.records if record.name.startswith(("api", "clawloop"))]
    assert any(getattr(record, "turn_id", None) for record in records)
    logged = " ".join(str(record.__dict__) for record in records)
    assert "very-private" not in logged
    assert "Hello" not in logged
    assert fresh_gateway.key not in logged


@pytest.mark.parametrize("word", ["poison", "bug"])
async def test_turns_in_memory_that_cannot_be_stored_block_no_others(
    tmp_path: Path, engine: FakeEngine, word: str
) -> None:
    async with running_gateway(tmp_path, engines=[engine], spool_bytes=0) as gateway, gateway.client() as client:
        held, store = gateway.services.recorder._held, PoisonStore()
        store.available = False
        held._store = gateway.services.recorder._inserts._store = gateway.services.recorder._drain._store = store
        for text in [word] * DRAIN_BATCH_TURNS + ["fine"]:
            assert (await client.post(PATH, json=chat_body(text))).status_code == 200
        assert len(held._turns) == DRAIN_BATCH_TURNS + 1
        store.available = True
        await until(lambda: store.records)
        await until(lambda: word == "bug" or not held._turns)
        metrics = (await client.get("/metrics")).text
        assert [record.messages[0]["content"] for record in store.records] == ["fine"]
        if word == "poison":  # `rejected/` is full too
            assert f'clawloop_gateway_turns_lost_total{{why="rejected"}} {DRAIN_BATCH_TURNS}.0' in metrics
            assert "clawloop_gateway_held_turns 0.0" in metrics
        else:
            assert len(held._turns) == DRAIN_BATCH_TURNS  # a bug may be mended: tried again and again


def _lost(metrics: str) -> list[str]:
    counts = (line for line in metrics.splitlines() if line.startswith("clawloop_gateway_turns_lost_total{"))
    return [line for line in counts if not line.endswith(" 0.0")]
