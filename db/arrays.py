"""Encodes token ids and log-probs as bytes, without loss.

bytea rather than int4[] and float4[]: the same size on disk, and 32,000 of each are written in 9 ms instead of 29 and
read in 1 instead of 3 (measured). Little-endian, without header.

A token id takes 4 bytes. A log-prob takes 4 if all log-probs of the turn are float32 values, which is what vLLM
computes (it prints them as doubles), and 8 otherwise: nothing is rounded.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from typing import Literal

from clawloop.errors import RecordUnusable

ID_BYTES = 4
_FLOAT32_BYTES = 4
_FLOAT64_BYTES = 8


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """The ids as 32-bit integers.

    Raises:
        RecordUnusable: an id does not fit in 32 bits.
    """
    try:
        return _little_endian(array("i", ids))
    except OverflowError as error:
        raise RecordUnusable("a token id does not fit in 32 bits") from error


def bytes_to_ids(stored: bytes) -> list[int]:
    return _integers(stored)


def logprobs_to_bytes(logprobs: Sequence[float]) -> bytes:
    narrow = array("f", logprobs)
    wide = array("d", logprobs)
    return _little_endian(narrow if array("d", narrow) == wide else wide)


def bytes_to_logprobs(stored: bytes, count: int) -> list[float]:
    """The log-probs of `count` tokens.

    Raises:
        RecordUnusable: the length fits another number of tokens.
    """
    if len(stored) == count * _FLOAT32_BYTES:
        return _floats("f", stored)
    if len(stored) == count * _FLOAT64_BYTES:
        return _floats("d", stored)
    raise RecordUnusable(f"{len(stored)} bytes of log-probs for {count} tokens")


def advantages_to_bytes(advantages: Sequence[float | None]) -> bytes:
    """Float32, which is what the trainer computes; NaN for a token without one."""
    return _little_endian(array("f", [math.nan if value is None else value for value in advantages]))


def bytes_to_advantages(stored: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in _floats("f", stored)]


def shared_ids(left: bytes, right: bytes) -> int:
    """Length of the common prefix of two encoded id sequences."""
    low, high = 0, min(len(left), len(right)) // ID_BYTES
    while low < high:  # bisection over byte comparisons is faster than any loop over ids
        middle = (low + high + 1) // 2
        same = left[low * ID_BYTES : middle * ID_BYTES] == right[low * ID_BYTES : middle * ID_BYTES]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


def _little_endian(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _integers(stored: bytes) -> list[int]:
    values = array("i", stored)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _floats(code: Literal["f", "d"], stored: bytes) -> list[float]:
    values = array(code, stored)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
