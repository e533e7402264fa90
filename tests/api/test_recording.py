"""Turns are recorded in PostgreSQL or on disk: under overload, in an outage, from two gateways, after a kill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from api.recording import insert_queue
from api.recording import insert_queue as insert_queue_module
from api.recording.insert_queue import InsertQueue
from api.recording.notifier import NotificationQueue
from api.recording.recorder import Recorder
from api.recording.spool import Spool
from clawloop.core.contracts.turns import InsertedTurn, SessionEvidence, SessionSource, TurnRecord
from clawloop.core.encryption.key_file import add_key, make_keys
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.errors import EncryptionKeyMissing, RecordUnusable, StoreUnavailable
from clawloop.core.telemetry.metrics import GatewayMetrics
from tests.api.conftest import until
from tests.fakes.session_store import FakeSessionStore
from tests.fakes.turn_store import FakeTurnStore
from tests.records import turn_record


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
