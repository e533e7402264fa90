from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.errors import RecordUnusable
from db.content import (
    advantages_to_bytes,
    bytes_to_advantages,
    bytes_to_ids,
    bytes_to_logprobs,
    ids_to_bytes,
    logprobs_to_bytes,
    shared_ids,
)

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
