"""Turns on local disk survive a kill and come back whole and in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from api.recording.spool import Spool, SpoolFull
from clawloop.contracts.turns import TurnRecord
from clawloop.errors import RecordUnusable
from tests.records import turn_record


def test_a_spooled_turn_comes_back_as_it_was_in_the_order_of_requests(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10**6)
    records = [turn_record(f"turn {n}\u0000 é") for n in range(5)]
    for record in reversed(records):
        spool.write(record)
    spool.close()
    again = Spool(tmp_path, 10**6)
    assert again.turn_ids() == [record.turn_id for record in records]
    assert [again.read(turn_id) for turn_id in again.turn_ids()] == records
    assert again.size_bytes == spool.size_bytes > 0


def test_a_turn_cut_off_while_it_was_written_is_not_taken_for_one(tmp_path: Path) -> None:
    first = Spool(tmp_path, 10**6)
    first.write(turn_record("a"))
    first.close()
    own = tmp_path / "gateway-0"
    (own / f"{turn_record('b').turn_id}.tmp").write_bytes(b'{"turn_id": ')
    (own / "notes.json").write_bytes(b"{}")
    assert Spool(tmp_path, 10**6).turns == 1
    assert not list(own.glob("*.tmp"))


def test_gateways_that_share_a_folder_do_not_share_turns_until_one_dies(tmp_path: Path) -> None:
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


def test_the_spool_is_bounded_and_says_so(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 2000)
    spool.write(turn_record("a"))
    with pytest.raises(SpoolFull, match="1 turns wait"):
        spool.write(turn_record("b" * 2000))
    assert spool.turns == 1


def test_what_cannot_be_read_is_set_aside_not_deleted(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 10**6)
    record = turn_record("a")
    spool.write(record)
    (tmp_path / "gateway-0" / f"{record.turn_id}.json").write_bytes(b"torn")
    with pytest.raises(RecordUnusable):
        spool.read(record.turn_id)
    kept = spool.reject(record.turn_id)
    assert kept.read_bytes() == b"torn"
    assert (spool.turns, spool.size_bytes) == (0, 0)


@given(logprobs=st.lists(st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32), max_size=20))
def test_log_probs_survive_the_disk_bit_for_bit(logprobs: list[float]) -> None:
    adapter = TypeAdapter(TurnRecord)
    record = turn_record("a", response_ids=list(range(len(logprobs))), logprobs=logprobs)
    assert adapter.validate_json(adapter.dump_json(record)).logprobs == logprobs
