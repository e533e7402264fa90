"""Turns are recorded in PostgreSQL or on disk, whatever is away, full or killed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from api.recording import insert_queue
from api.recording import insert_queue as insert_queue_module
from api.recording import notifier as notifier_module
from api.recording.insert_queue import DRAIN_BATCH_TURNS, InsertQueue
from api.recording.notifier import NotificationQueue
from api.recording.recorder import Recorder
from api.recording.spool import Spool
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import TurnRecorded
from clawloop.core.contracts.turns import InsertedTurn, SessionEvidence, SessionSource, TurnRecord
from clawloop.core.encryption.key_file import add_key, make_keys
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import EncryptionKeyMissing, RecordUnusable, StoreUnavailable
from clawloop.core.ids import turn_id_of
from clawloop.core.settings import WhenStorageIsFull
from clawloop.core.telemetry.metrics import GatewayMetrics
from tests.api.chat_requests import PATH, chat, chat_body
from tests.api.conftest import Gateway, running_gateway, until
from tests.fakes.engine import FakeEngine, fake_engine
from tests.fakes.notifier import FakeNotifier
from tests.fakes.session_store import FakeSessionStore
from tests.fakes.turn_store import FakeTurnStore
from tests.records import turn_record

# Turns are recorded in PostgreSQL or on disk: under overload, in an outage, from two gateways, after a kill.


class GatedStore:
    """A turn store that answers only while its gate is open; several of them may share the same turns.

    Attributes:
        batches: how many records each call had.
        poison: user messages of turns that can never be stored.
        keyless: user messages of turns that continue what this process has no key for.
        breaks: user messages of turns at which the store itself fails, as by a bug.
    """

    def __init__(self, turns: FakeTurnStore) -> None:
        self.turns = turns
        self.gate = asyncio.Event()
        self.gate.set()
        self.batches: list[int] = []
        self.poison: set[str] = set()
        self.keyless: set[str] = set()
        self.breaks: set[str] = set()

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        self.batches.append(len(records))
        await self.gate.wait()
        if any(record.messages[0]["content"] in self.breaks for record in records):
            raise KeyError("a bug")
        return [await self._result(record) for record in records]

    async def _result(self, record: TurnRecord) -> InsertedTurn | Exception:
        if record.messages[0]["content"] in self.poison:
            return RecordUnusable("on purpose")
        if record.messages[0]["content"] in self.keyless:
            return EncryptionKeyMissing("on purpose")
        return (await self.turns.insert_many([record]))[0]


class AwayAtTheThird(GatedStore):
    """It does not take the third batch in time."""

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        if len(self.batches) == 2:
            self.batches.append(len(records))
            return [StoreUnavailable("on purpose")] * len(records)
        return await super().insert_many(records)


class Unavailable(GatedStore):
    """It does not answer."""

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        self.batches.append(len(records))
        return [StoreUnavailable("on purpose")] * len(records)


class Clock:
    """Replaces the module `time`; the test advances it."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@asynccontextmanager
async def running_recorder(direct: GatedStore, drained: GatedStore, spool: Spool) -> AsyncIterator[Recorder]:
    metrics, turns = GatewayMetrics(), direct.turns
    async with NotificationQueue(None, turns, FakeSessionStore(turns), metrics) as notifications:
        # GatedStore has what recording calls, of the whole port.
        stores: tuple[FakeTurnStore, FakeTurnStore] = (direct, drained)  # type: ignore[assignment]
        async with Recorder(*stores, spool, metrics, notifications) as recorder:
            yield recorder
    spool.close()


async def record_all(recorder: Recorder, *texts: str) -> list[TurnRecord]:
    """One turn for each text, at once, each in a session of its own."""
    records = [turn_record(text, evidence=SessionEvidence(SessionSource.HEADER, text)) for text in texts]
    await asyncio.gather(*(recorder.record(record) for record in records))
    return records


def texts_of(turns: FakeTurnStore) -> list[object]:
    return [record.messages[0]["content"] for record in turns.records]


async def test_after_an_overload_turns_go_to_postgres_at_once_whatever_the_spool_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert_queue, "LIMIT_SECONDS", 0.05)
    turns = FakeTurnStore()
    direct, drained = GatedStore(turns), GatedStore(turns)
    spool = Spool(tmp_path, 10**8)
    async with running_recorder(direct, drained, spool) as recorder:
        direct.gate.clear()
        drained.gate.clear()
        late = await record_all(recorder, *(f"late {n}" for n in range(40)))
        assert (spool.turns, turns.records) == (40, [])

        monkeypatch.setattr(insert_queue, "LIMIT_SECONDS", 30)
        direct.gate.set()
        await until(lambda: turns.records)  # what crossed the limit is committed after all
        await record_all(recorder, "direct")

        assert spool.turns == 40
        assert "direct" in texts_of(turns)
        drained.gate.set()
        await until(lambda: not spool.turns)
    # Whoever stored a turn, the limit's crossing did not double it.
    assert sorted(record.turn_id for record in turns.records if record in late) == [turn.turn_id for turn in late]
    assert len(turns.records) == 41
    assert max(drained.batches) <= insert_queue_module.LONGEST_BATCH_TURNS


async def test_a_long_backlog_is_stored_in_larger_batches_and_in_smaller_ones_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert_queue_module, "RETRY_SECONDS", 0.01)
    earlier = Spool(tmp_path, 10**8)
    for n in range(100):
        earlier.write(turn_record(f"{n}", evidence=SessionEvidence(SessionSource.HEADER, f"{n}")))
    earlier.close()
    store, spool = AwayAtTheThird(FakeTurnStore()), Spool(tmp_path, 10**8)
    async with running_recorder(store, store, spool):
        await until(lambda: not spool.turns)
    assert store.batches == [8, 16, 32, 8, 16, 16, 16, 16, 4]


async def test_turns_that_end_together_share_transactions(tmp_path: Path) -> None:
    turns = FakeTurnStore()
    store = GatedStore(turns)
    async with running_recorder(store, store, Spool(tmp_path, 10**8)) as recorder:
        await record_all(recorder, "lone")
        assert store.batches == [1]
        await record_all(recorder, *(f"together {n}" for n in range(64)))
    assert len(turns.records) == 65
    assert max(store.batches) <= insert_queue.BATCH_TURNS
    assert len(store.batches) <= 10


async def test_one_unusable_turn_of_a_batch_costs_no_other(tmp_path: Path) -> None:
    turns = FakeTurnStore()
    store = GatedStore(turns)
    store.poison.add("poison")
    async with running_recorder(store, store, Spool(tmp_path, 10**8)) as recorder:
        await record_all(recorder, "a", "b", "poison", "c")
    assert sorted(map(str, texts_of(turns))) == ["a", "b", "c"]
    assert len(list(tmp_path.glob("*/rejected/*.json"))) == 1


async def test_while_postgres_is_away_one_turn_at_a_time_tries_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(insert_queue, "time", clock)
    turns = FakeTurnStore()
    turns.available = False
    store = GatedStore(turns)
    async with InsertQueue(store) as inserts:  # type: ignore[arg-type]
        with pytest.raises(StoreUnavailable, match="the fake store"):
            await inserts.insert(turn_record("notices"))
        clock.now += insert_queue.AWAY_SECONDS - 0.1
        with pytest.raises(StoreUnavailable, match="a moment ago"):
            await inserts.insert(turn_record("too early"))
        clock.now += 0.2
        store.gate.clear()
        trying = asyncio.create_task(inserts.insert(turn_record("tries")))
        await until(lambda: len(store.batches) == 2)
        with pytest.raises(StoreUnavailable, match="a moment ago"):
            await inserts.insert(turn_record("does not wait for that"))
        turns.available = True
        store.gate.set()
        await trying
        await inserts.insert(turn_record("back"))
    assert texts_of(turns) == ["tries", "back"]


async def test_the_drain_notices_that_postgres_is_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert_queue, "AWAY_SECONDS", 10**6)
    monkeypatch.setattr(insert_queue_module, "RETRY_SECONDS", 0.01)
    turns = FakeTurnStore()
    store = GatedStore(turns)
    spool = Spool(tmp_path, 10**8)
    async with running_recorder(store, store, spool) as recorder:
        turns.available = False
        await record_all(recorder, "away")
        assert spool.turns == 1
        turns.available = True
        await until(lambda: not spool.turns)
        await record_all(recorder, "back")
        assert spool.turns == 0
    assert texts_of(turns) == ["away", "back"]


async def test_a_turn_that_was_stored_but_not_removed_before_a_kill_is_stored_once(tmp_path: Path) -> None:
    turns = FakeTurnStore()
    killed = Spool(tmp_path, 10**8)
    record = turn_record("stored")
    killed.write(record)
    await turns.insert(record)
    killed.close()
    store = GatedStore(turns)
    spool = Spool(tmp_path, 10**8)
    async with running_recorder(store, store, spool):
        await until(lambda: not spool.turns)
    assert texts_of(turns) == ["stored"]
    assert not list(tmp_path.glob("*/*.json"))


async def test_a_damaged_file_is_set_aside_and_holds_up_no_turn(tmp_path: Path) -> None:
    turns = FakeTurnStore()
    spool = Spool(tmp_path, 10**8)
    first, damaged, last = (turn_record(text) for text in ("first", "damaged", "last"))
    for record in (first, damaged, last):
        spool.write(record)
    next(tmp_path.glob(f"*/{damaged.turn_id}.json")).write_bytes(b'{"turn_id": ')
    store = GatedStore(turns)
    async with running_recorder(store, store, spool):
        await until(lambda: not spool.turns)
    assert texts_of(turns) == ["first", "last"]
    assert [path.stem for path in tmp_path.glob("*/rejected/*.json")] == [str(damaged.turn_id)]


async def test_a_turn_at_which_the_store_breaks_holds_up_no_spooled_turn(tmp_path: Path) -> None:
    turns = FakeTurnStore()
    store = GatedStore(turns)
    store.breaks = {"broken"}
    spool = Spool(tmp_path, 10**8)
    for text in ("a", "b", "broken", "c"):
        spool.write(turn_record(text, evidence=SessionEvidence(SessionSource.HEADER, text)))
    async with running_recorder(store, store, spool):
        await until(lambda: spool.turns == 1)
        assert sorted(map(str, texts_of(turns))) == ["a", "b", "c"]
        store.breaks.clear()  # a mended gateway
        await until(lambda: spool.turns == 0)
    assert "broken" in texts_of(turns)


async def test_two_gateways_drain_one_folder_and_take_over_a_dead_ones_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insert_queue_module, "TAKE_OVER_SECONDS", 0.02)
    turns = FakeTurnStore()
    store = GatedStore(turns)
    one, two, dead = (Spool(tmp_path, 10**8) for _ in range(3))
    written = [turn_record(str(n)) for n in range(60)]
    for number, record in enumerate(written):
        (one, two, dead)[number % 3].write(record)
    async with running_recorder(store, store, one), running_recorder(store, store, two):
        await until(lambda: len(turns.records) == 40)
        dead.close()
        await until(lambda: len(turns.records) == 60)
        await until(lambda: not list(tmp_path.glob("*/*.json")))
    assert sorted(record.turn_id for record in turns.records) == [record.turn_id for record in written]


async def test_a_turn_is_stored_before_its_spooled_parent_and_gets_it_later(tmp_path: Path) -> None:
    turns = FakeTurnStore()
    direct, drained = GatedStore(turns), GatedStore(turns)
    drained.gate.clear()
    first = turn_record("one")
    assert first.response is not None
    second = turn_record(messages=[*first.messages, first.response, {"role": "user", "content": "two"}])
    spool = Spool(tmp_path, 10**8)
    spool.write(first)
    async with running_recorder(direct, drained, spool) as recorder:
        await recorder.record(second)
        stored = await turns.load(second.turn_id)
        assert stored is not None
        assert stored.parent_turn_id is None
        drained.gate.set()
        await until(lambda: not spool.turns)
    late, stored = await turns.load(first.turn_id), await turns.load(second.turn_id)
    assert late is not None
    assert stored is not None
    assert (stored.parent_turn_id, stored.session_id) == (first.turn_id, late.session_id)


async def test_turns_whose_key_is_missing_wait_in_the_spool_until_it_comes(tmp_path: Path) -> None:
    new, old = tmp_path / "keys", tmp_path / "old"
    make_keys(new)
    old.touch(0o600)
    old.write_bytes(new.read_bytes())
    add_key(new)
    dead = Spool(tmp_path / "spool", 10**8, sealer=Sealer(new))
    dead.write(turn_record("of another gateway", evidence=SessionEvidence(SessionSource.HEADER, "other")))
    dead.close()
    turns = FakeTurnStore()
    store = GatedStore(turns)
    store.keyless = {"continues"}
    spool = Spool(tmp_path / "spool", 10**8, sealer=Sealer(old))
    async with running_recorder(store, store, spool) as recorder:
        await record_all(recorder, "continues", "own")
        await until(lambda: texts_of(turns) == ["own"] and len(store.batches) > 2)
        assert spool.turns == 2
        store.keyless.clear()
        old.write_bytes(new.read_bytes())  # the new file is copied to this machine
        await until(lambda: not spool.turns)
    assert sorted(map(str, texts_of(turns))) == ["continues", "of another gateway", "own"]
    assert not list(tmp_path.glob("spool/*/rejected/*"))


def is_stuck(recorder: Recorder) -> bool:
    return recorder._metrics.registry.get_sample_value("clawloop_gateway_spool_stuck") == 1


def lost(recorder: Recorder, why: str) -> float | None:
    return recorder._metrics.registry.get_sample_value("clawloop_gateway_turns_lost_total", {"why": why})


@pytest.mark.parametrize("why", ["breaks", "keyless"])
async def test_a_spool_that_is_stuck_though_postgres_answers_says_so_until_it_drains(tmp_path: Path, why: str) -> None:
    turns = FakeTurnStore()
    store = GatedStore(turns)
    getattr(store, why).add("stuck")
    spool = Spool(tmp_path, 10**8)
    async with running_recorder(store, store, spool) as recorder:
        assert not is_stuck(recorder)
        await record_all(recorder, "stuck", "fine")
        await until(lambda: is_stuck(recorder) and spool.turns == 1)
        getattr(store, why).clear()
        await until(lambda: not spool.turns and not is_stuck(recorder))
    assert sorted(map(str, texts_of(turns))) == ["fine", "stuck"]


async def test_a_spool_that_the_disk_does_not_give_back_is_stuck(tmp_path: Path) -> None:
    turns = FakeTurnStore()
    store = GatedStore(turns)
    spool = Spool(tmp_path, 10**8)
    record = turn_record("behind a folder")
    spool.write(record)
    path = spool._path(record.turn_id)
    content = path.read_bytes()
    path.unlink()
    path.mkdir()  # cannot be read, whoever asks
    async with running_recorder(store, store, spool) as recorder:
        await until(lambda: is_stuck(recorder))
        path.rmdir()
        path.write_bytes(content)
        await until(lambda: turns.records and not is_stuck(recorder))


async def test_a_spool_that_waits_for_postgres_is_not_stuck(tmp_path: Path) -> None:
    turns = FakeTurnStore()
    store = Unavailable(turns)
    spool = Spool(tmp_path, 10**8)
    async with running_recorder(store, store, spool) as recorder:
        await record_all(recorder, "waits")
        await until(lambda: len(store.batches) > 3)  # some of them by the drain
        assert (spool.turns, is_stuck(recorder)) == (1, False)


# PostgreSQL away: chat goes on from caches; turns are spooled, and stored later in order.


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


# Session workflows are notified of stored turns in the background: chat neither waits for it nor fails with it.


@asynccontextmanager
async def notifying_gateway(folder: Path, notifier: FakeNotifier) -> AsyncIterator[Gateway]:
    async with fake_engine() as engine, running_gateway(folder, engines=[engine], notifier=notifier) as running:
        yield running


class SteppedClock:
    """Replaces the module `time`; the test advances it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_each_main_turn_is_notified_once_with_ids_and_marked(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with notifying_gateway(tmp_path, notifier) as gateway:
        replies = [await chat(gateway, session_id="s", session_done=done) for done in (False, True)]
        await chat(gateway, session_id="s", turn_type="side")
        await until(lambda: len(gateway.turns.announced) == 2)
    turns = [turn_id_of(response) for response in replies]
    assert [message for _, message in notifier.sent] == [
        TurnRecorded(turns[0], 0, ends_session=False, opens_session=True),  # type: ignore[arg-type]
        TurnRecorded(turns[1], 0, ends_session=True),  # type: ignore[arg-type]
    ]
    assert len({session.session_id for session, _ in notifier.sent}) == 1
    assert {(session.policy, session.identified_by) for session, _ in notifier.sent} == {("default", "session_id")}


async def test_a_mark_says_how_long_ago_its_signal_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, notifier = SteppedClock(), FakeNotifier()
    monkeypatch.setattr(notifier_module, "time", clock)
    notify = notifier.notify

    async def takes_long(notice: SessionNotice) -> None:
        await notify(notice)
        clock.now += 3.0

    monkeypatch.setattr(notifier, "notify", takes_long)
    async with notifying_gateway(tmp_path, notifier) as gateway:
        await chat(gateway)
        await until(lambda: gateway.turns.announced)
    assert gateway.turns.marked_ago == [timedelta(seconds=3)]


async def test_each_choice_of_a_request_is_notified(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with notifying_gateway(tmp_path, notifier) as gateway:
        await chat(gateway, n=3)
        await until(lambda: len(gateway.turns.announced) == 3)


async def test_a_failed_notification_is_left_to_the_sweep_and_later_turns_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock()
    monkeypatch.setattr(notifier_module, "time", clock)
    notifier = FakeNotifier()
    notifier.available = False
    async with notifying_gateway(tmp_path, notifier) as gateway:
        clock.now = 1.0
        await chat(gateway)
        await until(lambda: notifier.calls == 1)
        clock.now += notifier_module.PAUSE_SECONDS - 0.1
        await chat(gateway)  # within the pause: not even tried
        assert notifier.calls == 1
        notifier.available = True
        clock.now += 0.2
        last = await chat(gateway)
        await until(lambda: gateway.turns.announced)
        assert list(gateway.turns.announced) == [turn_id_of(last)]
        assert len(gateway.turns.records) == 3


async def test_a_spooled_turn_is_notified_once_it_is_stored(tmp_path: Path) -> None:
    notifier = FakeNotifier()
    async with notifying_gateway(tmp_path, notifier) as gateway:
        gateway.turns.available = False
        await chat(gateway)  # spooled
        await asyncio.sleep(0.1)
        assert notifier.sent == []
        gateway.turns.available = True
        await until(lambda: len(gateway.turns.announced) == 1)


@pytest.mark.parametrize("place", ["notifier", "store"])
async def test_a_bug_is_logged_and_the_messages_behind_it_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    notifier, broken = FakeNotifier(), asyncio.Event()

    async def breaks(*_: object) -> None:
        broken.set()
        raise KeyError("a bug")

    async with notifying_gateway(tmp_path, notifier) as gateway:
        with monkeypatch.context() as patched:
            if place == "notifier":
                patched.setattr(notifier, "notify", breaks)
            else:
                patched.setattr(gateway.turns, "mark_notified", breaks)
            await chat(gateway, session_id="one")
            await asyncio.wait_for(broken.wait(), 30)
        last = await chat(gateway, session_id="one")  # in the same queue
        await until(lambda: turn_id_of(last) in gateway.turns.announced)
    [logged] = [record for record in caplog.records if record.name == notifier_module.__name__]
    assert logged.exc_info is not None
    assert logged.exc_info[0] is KeyError
    unsent = gateway.services.metrics.notifications.labels("left to the sweep")
    assert unsent._value.get() == (1 if place == "notifier" else 0)


async def test_the_queue_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier_module, "QUEUE_LIMIT", 2)
    notifier = FakeNotifier()
    notifier.hangs = True
    async with notifying_gateway(tmp_path, notifier) as gateway:
        for _ in range(6):
            await chat(gateway, session_id="one")
        unsent = gateway.services.metrics.notifications.labels("left to the sweep")
        # One being sent, at most two queued behind it.
        assert unsent._value.get() >= 3
        assert notifier.calls == 1


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_chat_waits_neither_for_a_notification_nor_for_its_failure(tmp_path: Path, hangs: bool) -> None:
    notifier = FakeNotifier()
    notifier.hangs, notifier.available = hangs, False
    async with notifying_gateway(tmp_path, notifier) as gateway, gateway.client() as client:
        for _ in range(3):  # one that waited for a notification that hangs would never be answered
            assert (await client.post(PATH, json=chat_body())).status_code == 200
        await until(lambda: notifier.calls)
        assert (len(gateway.turns.records), gateway.turns.announced) == (3, {})
