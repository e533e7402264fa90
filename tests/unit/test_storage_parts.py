"""What is stored: arrays, ids, the spool, shared transactions."""

from __future__ import annotations

import asyncio
import errno
import math
import shutil
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from api.recording import spool as spool_module
from api.recording.spool import Spool, SpoolFull
from clawloop.core.batches import Batches
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.errors import RecordUnusable, StoreContended, StoreTimedOut, StoreUnavailable
from clawloop.core.ids import new_turn_id
from db.content import (
    advantages_to_bytes,
    bytes_to_advantages,
    bytes_to_ids,
    bytes_to_logprobs,
    ids_to_bytes,
    logprobs_to_bytes,
    shared_ids,
)
from db.group_commit import ALONE, Answer, GroupCommit
from db.training.claims import known_prompt_tokens
from tests.records import turn_record

# Spooled turns survive a kill, and are read back whole and in order.


def test_spooled_turns_are_read_back_unchanged_in_the_order_of_requests(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10**6)
    records = [turn_record(f"turn {n}\u0000 é") for n in range(5)]
    for record in reversed(records):
        spool.write(record)
    spool.close()
    reopened = Spool(tmp_path, 10**6)
    assert reopened.turn_ids() == [record.turn_id for record in records]
    assert [reopened.read(turn_id) for turn_id in reopened.turn_ids()] == records
    assert reopened.size_bytes == spool.size_bytes > 0


def test_a_partly_written_turn_is_discarded(tmp_path: Path) -> None:
    first = Spool(tmp_path, 10**6)
    first.write(turn_record("a"))
    first.close()
    subfolder = tmp_path / "gateway-0"
    (subfolder / f"{turn_record('b').turn_id}.tmp").write_bytes(b'{"turn_id": ')
    (subfolder / "notes.json").write_bytes(b"{}")
    assert Spool(tmp_path, 10**6).turns == 1
    assert not list(subfolder.glob("*.tmp"))


def test_a_gateway_takes_over_turns_only_of_one_that_died(tmp_path: Path) -> None:
    first, second = Spool(tmp_path, 10**6), Spool(tmp_path, 10**6)
    record, other = turn_record("a"), turn_record("b")
    first.write(record)
    second.write(other)
    assert (first.turn_ids(), second.turn_ids()) == ([record.turn_id], [other.turn_id])
    first.close()
    third = Spool(tmp_path, 10**6)
    assert third.turn_ids() == [record.turn_id]
    second.close()
    third.close()
    assert Spool(tmp_path, 10**6).turn_ids() == [record.turn_id, other.turn_id]


def test_a_running_gateway_takes_over_the_turns_of_one_that_died(tmp_path: Path) -> None:
    first, second = Spool(tmp_path, 10**6), Spool(tmp_path, 10**6)
    record = turn_record("a")
    first.write(record)
    assert not second.take_over()
    assert second.turns == 0
    first.close()
    assert not second.take_over()
    assert second.turn_ids() == [record.turn_id]
    assert second.read(record.turn_id) == record
    assert second.size_bytes > 0


def test_a_folder_that_cannot_be_taken_over_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spools = [Spool(tmp_path, 10**6) for _ in range(3)]
    for spool in spools[:2]:
        spool.write(turn_record())
        spool.close()
    broken = spools[1]._folder
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.parent == broken:
            raise OSError(errno.EIO, "the disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    [failed] = spools[2].take_over()
    assert failed.parent == broken
    assert spools[2].turns == 1
    spools[2].close()
    assert Spool(tmp_path, 10**6).turns == 1  # it starts all the same


def test_a_file_that_cannot_be_taken_over_keeps_no_other_of_its_folder_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, running = Spool(tmp_path, 10**6), Spool(tmp_path, 10**6)
    records = [turn_record() for _ in range(3)]
    _write_all(dead, records)
    dead.close()
    rename, broken = Path.rename, list[Path]()

    def fails_for_the_first(path: Path, target: Path) -> Path:
        broken[:] = broken or [path]
        if path in broken:
            raise OSError(errno.EIO, "the disk")
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fails_for_the_first)
        for _ in range(2):
            assert list(running.take_over()) == broken
            assert running.turns == 2
    assert not running.take_over()
    assert running.turn_ids() == [record.turn_id for record in records]


def test_what_a_dead_gateway_had_begun_to_write_keeps_no_turn_though_it_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, running = Spool(tmp_path, 10**6), Spool(tmp_path, 10**6)
    dead.write(turn_record())
    dead.close()
    (dead._folder / "torn.tmp").write_bytes(b"{")
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EIO, "the disk")))
    assert list(running.take_over()) == [dead._folder]
    assert running.turns == 1


def test_a_rejected_turn_is_kept_and_does_not_wait(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10**6)
    path = spool.write_rejected(turn_record("a"))
    assert path.parent.name == "rejected"
    assert path.read_bytes()
    assert (spool.turns, spool.size_bytes) == (0, 0)


def test_a_full_spool_refuses_a_turn(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 2000)
    spool.write(turn_record("a"))
    with pytest.raises(SpoolFull, match="the limit is 2000"):
        spool.write(turn_record("b" * 2000))
    assert spool.turns == 1


def test_the_limit_is_of_the_folder_whoever_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(TypeAdapter(TurnRecord).dump_json(turn_record("a")))
    monkeypatch.setattr(spool_module, "_OTHERS_SECONDS", 0.0)
    first, second = (Spool(tmp_path, 2 * size + size // 2) for _ in range(2))
    first.write(turn_record("a"))
    second.write(turn_record("b"))
    for spool in (first, second):
        with pytest.raises(SpoolFull):
            spool.write(turn_record("c"))
    first.remove(first.turn_ids()[0])
    second.write(turn_record("c"))
    second.close()
    assert not first.take_over()
    assert first.turns == 2
    with pytest.raises(SpoolFull):
        first.write(turn_record("d"))


class SmallDisk:
    """The spool's disk with little room: writes and reserves beyond it fail as on a full disk."""

    def __init__(self, folder: Path, size_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self.size_bytes = folder, size_bytes
        write = spool_module._write_synced

        def write_if_room(path: Path, content: bytes) -> None:
            if len(content) > self.free:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, content)

        monkeypatch.setattr(spool_module, "_write_synced", write_if_room)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: self)

    @property
    def free(self) -> int:
        return self.size_bytes - sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())


def _write_all(spool: Spool, records: list[TurnRecord]) -> None:
    for record in records:
        spool.write(record)


def test_a_full_disk_takes_turns_out_of_the_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SmallDisk(tmp_path, 300_000, monkeypatch)
    spool = Spool(tmp_path, 10**6, reserve_bytes=100_000)
    reserve = tmp_path / "gateway-0" / "reserve"
    assert reserve.stat().st_size == 100_000
    others = tmp_path / "others"
    others.write_bytes(bytes(disk.free))

    for _ in range(5):  # each turn takes its size and a margin out of the reserve, until none is left
        spool.write(turn_record("a" * 1000))
    full = [turn_record("a" * 1000) for _ in range(100)]
    with pytest.raises(OSError, match="No space left"):
        _write_all(spool, full)
    assert reserve.stat().st_size == 0
    assert 5 <= spool.turns < 100

    spool.restore_reserve()
    assert reserve.stat().st_size == 0  # turns wait
    others.unlink()
    for turn_id in spool.turn_ids():
        spool.remove(turn_id)
    spool.restore_reserve()
    assert reserve.stat().st_size == 100_000


def test_a_reserve_leaves_a_full_disk_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(tmp_path, 150_000, monkeypatch)
    spool = Spool(tmp_path, 10**6, reserve_bytes=100_000)
    assert (tmp_path / "gateway-0" / "reserve").stat().st_size == 0
    spool.write(turn_record("a"))
    assert spool.turns == 1


def test_rejected_turns_have_a_limit_of_their_own(tmp_path: Path) -> None:
    size = len(TypeAdapter(TurnRecord).dump_json(turn_record("a")))
    spool = Spool(tmp_path, 2 * size + size // 2)
    spool.write_rejected(turn_record("a"))
    spool.write_rejected(turn_record("b"))
    with pytest.raises(SpoolFull):
        spool.write_rejected(turn_record("c"))
    spool.write(turn_record("d"))


def test_what_a_dead_gateway_had_begun_to_write_is_removed(tmp_path: Path) -> None:
    dead, running = Spool(tmp_path, 10**6), Spool(tmp_path, 10**6)
    dead.write_rejected(turn_record("a"))
    dead.close()
    folder = tmp_path / "gateway-0"
    torn = [folder / "torn.tmp", folder / "rejected" / "torn.tmp"]
    own = tmp_path / "gateway-1" / "now.tmp"
    for path in (*torn, own):
        path.write_bytes(b"{")
    running.take_over()
    assert [path.exists() for path in torn] == [False, False]
    assert own.exists()  # it is being written
    assert len(list((folder / "rejected").iterdir())) == 1


def test_an_unreadable_turn_is_moved_not_deleted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10**6)
    record = turn_record("a")
    spool.write(record)
    (tmp_path / "gateway-0" / f"{record.turn_id}.json").write_bytes(b"torn")
    with pytest.raises(RecordUnusable):
        spool.read(record.turn_id)
    rejected = spool.reject(record.turn_id)
    assert rejected.read_bytes() == b"torn"
    assert (spool.turns, spool.size_bytes) == (0, 0)


@given(logprobs=st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32), max_size=20))
def test_log_probs_survive_the_disk_bit_for_bit(logprobs: list[float]) -> None:
    adapter = TypeAdapter(TurnRecord)
    record = turn_record("a", response_ids=list(range(len(logprobs))), logprobs=logprobs)
    assert adapter.validate_json(adapter.dump_json(record)).logprobs == logprobs


def test_what_people_leave_in_the_folder_stops_no_gateway(tmp_path: Path) -> None:
    first = Spool(tmp_path, 10**6)
    record = turn_record("a")
    first.write(record)
    first.close()
    (tmp_path / "gateway-0.tar.gz").write_bytes(b"somebody's back-up")
    (tmp_path / "gateway-1").write_bytes(b"a file where the next gateway's folder would be")
    (tmp_path / "gateway-0" / "looked-at.tmp").mkdir()
    reopened, second = Spool(tmp_path, 10**6), Spool(tmp_path, 10**6)
    assert reopened.turn_ids() == [record.turn_id]
    assert not second.take_over()
    assert second.turns == 0
    assert list(spool_module.waiting_turns(tmp_path)) == []
    assert (tmp_path / "gateway-2").is_dir()


# Calls that come while a transaction runs share the next one, and errors stay with their own call.


class Transactions:
    """Answers a call by its name; records which calls shared a transaction.

    Args:
        fails: calls whose transaction fails, and how.
        alone: calls that need a transaction of their own.
    """

    def __init__(self, fails: dict[str, Exception] | None = None, alone: Sequence[str] = ()) -> None:
        self.fails = fails or {}
        self.needs_own = alone
        self.shared: list[list[str]] = []
        self.free = asyncio.Event()
        self.free.set()

    async def together(self, calls: Sequence[str]) -> list[Answer[str]]:
        self.shared.append(list(calls))
        await self.free.wait()
        for call in calls:
            if call in self.fails:
                raise self.fails[call]
        return [ALONE if call in self.needs_own and len(calls) > 1 else call.upper() for call in calls]

    async def answer(self, calls: Sequence[str]) -> list[str | Exception]:
        """As `together`, without ALONE."""
        self.shared.append(list(calls))
        await self.free.wait()
        return [call.upper() for call in calls]

    @property
    def apart(self) -> list[str]:
        """The calls that got a transaction of their own."""
        return [calls[0] for calls in self.shared if len(calls) == 1]

    def grouped(self) -> GroupCommit[str, str]:
        return GroupCommit[str, str](self.together, lambda call: call[0])


async def test_calls_that_come_together_share_a_transaction() -> None:
    done = Transactions()
    grouped = done.grouped()
    assert await grouped.run("a") == "A"
    assert await asyncio.gather(*map(grouped.run, "bcd")) == ["B", "C", "D"]
    assert done.shared == [["a"], ["b", "c", "d"]]


async def test_calls_that_come_while_one_runs_share_the_next() -> None:
    done = Transactions()
    grouped = done.grouped()
    done.free.clear()
    calls = [asyncio.create_task(grouped.run("a"))]
    while not done.shared:
        await asyncio.sleep(0)
    calls += [asyncio.create_task(grouped.run(call)) for call in "bc"]
    await asyncio.sleep(0)
    done.free.set()
    assert await asyncio.gather(*calls) == ["A", "B", "C"]
    assert done.shared == [["a"], ["b", "c"]]


async def test_two_calls_of_one_key_come_one_after_the_other() -> None:
    done = Transactions()
    assert await asyncio.gather(*map(done.grouped().run, ["a1", "a2", "b1"])) == ["A1", "A2", "B1"]
    assert done.shared == [["a1", "b1"], ["a2"]]


async def test_an_error_stays_with_its_call() -> None:
    done = Transactions({"b": RecordUnusable("b")})
    grouped = done.grouped()
    answers = await asyncio.gather(*map(grouped.run, "abc"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["A", "b", "C"]
    assert done.apart == ["a", "b", "c"]


async def test_contention_of_one_call_does_not_fail_the_others() -> None:
    done = Transactions({"b": StoreContended("locked")})
    answers = await asyncio.gather(*map(done.grouped().run, "ab"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["A", "locked"]


async def test_a_shared_transaction_that_takes_too_long_is_tried_by_its_calls_alone() -> None:
    done = Transactions({"b": StoreTimedOut("canceling statement due to statement timeout")})
    answers = await asyncio.gather(*map(done.grouped().run, "abc"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["A", "canceling statement due to statement timeout", "C"]
    assert done.apart == ["a", "b", "c"]


async def test_where_postgresql_is_away_nobody_tries_it_again() -> None:
    done = Transactions({"b": StoreUnavailable("away")})
    answers = await asyncio.gather(*map(done.grouped().run, "abc"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["away"] * 3
    assert done.apart == []


async def test_a_call_that_is_not_ordinary_gets_its_own_transaction() -> None:
    done = Transactions(alone=["b"])
    assert await asyncio.gather(*map(done.grouped().run, "abc")) == ["A", "B", "C"]
    assert done.apart == ["b"]


async def test_a_transaction_that_waits_does_not_hold_up_the_next() -> None:
    done = Transactions()
    grouped = done.grouped()
    done.free.clear()
    first = asyncio.create_task(grouped.run("a"))
    second = asyncio.create_task(grouped.run("b"))
    await asyncio.sleep(0)
    third = asyncio.create_task(grouped.run("c"))
    while len(done.shared) < 2:  # the first transaction has not ended
        await asyncio.sleep(0.01)
    done.free.set()
    assert [await first, await second, await third] == ["A", "B", "C"]


async def test_no_more_batches_run_at_once_than_may() -> None:
    done = Transactions()
    done.free.clear()
    batches = Batches[str, str](done.answer, most=1, at_once=2)
    calls = [asyncio.create_task(batches.run(call)) for call in "abc"]
    while len(done.shared) < 2:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    assert done.shared == [["a"], ["b"]]
    done.free.set()
    assert await asyncio.gather(*calls) == ["A", "B", "C"]


async def test_the_callers_of_a_batch_that_is_stopped_get_an_error() -> None:
    done = Transactions()
    done.free.clear()
    batches = Batches[str, str](done.answer, most=2)
    calls = [asyncio.create_task(batches.run(call)) for call in "ab"]
    while not done.shared:
        await asyncio.sleep(0)
    await batches.stop()
    async with asyncio.timeout(10):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(answer) for answer in answers] == [StoreUnavailable] * 2


async def test_a_cancelled_caller_leaves_the_others_alone() -> None:
    done = Transactions()
    grouped = done.grouped()
    done.free.clear()
    gone, stays = asyncio.create_task(grouped.run("a")), asyncio.create_task(grouped.run("b"))
    while not done.shared:
        await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    done.free.set()
    assert await stays == "B"


#

ids = st.lists(st.integers(0, 2**31 - 1))
float32s = st.lists(st.floats(width=32, allow_nan=False))
float64s = st.lists(st.floats(allow_nan=False))


def bits(values: list[float]) -> list[bytes]:
    return [struct.pack("<d", value) for value in values]


@given(ids)
def test_ids_round_trip(some: list[int]) -> None:
    assert bytes_to_ids(ids_to_bytes(some)) == some
    assert len(ids_to_bytes(some)) == 4 * len(some)


@given(float32s)
def test_float32_log_probs_take_4_bytes_and_round_trip_exactly(logprobs: list[float]) -> None:
    stored = logprobs_to_bytes(logprobs)
    assert len(stored) == 4 * len(logprobs)
    assert bits(bytes_to_logprobs(stored, len(logprobs))) == bits(logprobs)


@given(float64s)
def test_finer_log_probs_are_never_rounded(logprobs: list[float]) -> None:
    assert bits(bytes_to_logprobs(logprobs_to_bytes(logprobs), len(logprobs))) == bits(logprobs)


def test_the_bytes_are_little_endian_on_every_machine() -> None:
    assert ids_to_bytes([1, 256]).hex() == "0100000000010000"
    assert logprobs_to_bytes([-0.5]).hex() == "000000bf"
    assert logprobs_to_bytes([-0.1]).hex() == struct.pack("<d", -0.1).hex()


def test_values_beyond_float32_round_trip() -> None:
    values = [-1e300, -math.inf, 5e-324]
    assert bytes_to_logprobs(logprobs_to_bytes(values), 3) == values
    assert math.isnan(bytes_to_logprobs(logprobs_to_bytes([math.nan]), 1)[0])


@pytest.mark.parametrize("broken", [2**31, -(2**31) - 1])
def test_an_id_beyond_32_bits_is_rejected(broken: int) -> None:
    with pytest.raises(RecordUnusable):
        ids_to_bytes([1, broken])


@pytest.mark.parametrize(("stored", "count"), [(8, 0), (8, 3), (9, 1), (0, 1)])
def test_the_number_of_log_probs_must_be_that_of_tokens(stored: int, count: int) -> None:
    with pytest.raises(RecordUnusable, match=f"{stored} bytes of log-probs for {count} tokens"):
        bytes_to_logprobs(bytes(stored), count)


@given(ids, ids, ids)
def test_shared_ids_is_the_length_of_the_common_prefix(start: list[int], left: list[int], right: list[int]) -> None:
    one, other = start + left, start + right
    count = shared_ids(ids_to_bytes(one), ids_to_bytes(other))

    assert count >= len(start)
    assert one[:count] == other[:count]
    assert count == min(len(one), len(other)) or one[count] != other[count]


def test_advantages_are_read_back_and_a_token_without_one_stays_without() -> None:
    stored = [0.5, None, -2.0, 0.0]
    assert bytes_to_advantages(advantages_to_bytes(stored)) == stored
    assert len(advantages_to_bytes(stored)) == 4 * len(stored)


# Ids are ordered by time, also where the clock is not.

HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize("jump_ns", [-HOUR_NS, HOUR_NS])
def test_a_turn_id_is_greater_than_those_before_it_when_the_clock_jumps(
    monkeypatch: pytest.MonkeyPatch, jump_ns: int
) -> None:
    before = [new_turn_id() for _ in range(3)]
    now = time.time_ns
    with monkeypatch.context() as jumped:
        jumped.setattr(time, "time_ns", lambda: now() + jump_ns)
        after = [new_turn_id() for _ in range(3)]
    set_right = [new_turn_id() for _ in range(3)]
    ids = [*before, *after, *set_right]
    assert ids == sorted(set(ids))


# Which rows a claim can judge by what its own statement sees.


def test_a_parent_that_the_claim_does_not_see_yet_is_trusted() -> None:
    """A late turn became the parent between the claim's snapshot and its lock: the sample must not expire for it."""
    seen = SimpleNamespace(parent_turn_id="p", parent_tokens=7, prompt_shared=9, prompt_added=3)
    unseen = SimpleNamespace(parent_turn_id="p", parent_tokens=None, prompt_shared=9, prompt_added=3)
    orphan = SimpleNamespace(parent_turn_id=None, parent_tokens=None, prompt_shared=9, prompt_added=3)
    assert [known_prompt_tokens(row) for row in (seen, unseen, orphan)] == [10, 12, 3]
