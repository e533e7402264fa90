"""Server-sent events cut anywhere read the same as the openai SDK reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from clawloop.serving.events import event_data

LINES = st.sampled_from(["data: {}", "data:x", "data: a b", "data", ": comment", "event: e", "", "", "id: 4"])
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


async def _chunks(stream: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(stream), size):
        yield stream[start : start + size]


async def _read(stream: bytes, size: int) -> list[bytes]:
    return [data async for data in event_data(_chunks(stream, size), limit_bytes=10_000)]


@given(lines=st.lists(st.tuples(LINES, ENDS), max_size=20), size=st.integers(1, 7))
async def test_any_stream_reads_as_the_openai_sdk_reads_it(lines: list[tuple[str, str]], size: int) -> None:
    # A line end "\r" before an empty line with "\n" would be one "\r\n".
    stream = "".join(line + ("\n" if end == "\r" else end) for line, end in lines).encode()
    expected = [event.data.encode() for event in SSEDecoder().iter_bytes(iter([stream])) if event.data]
    assert [data for data in await _read(stream, size) if data] == expected


@given(size=st.integers(1, 30))
async def test_old_line_ends_are_read_however_they_are_cut(size: int) -> None:
    assert await _read(b"data: a\r\rdata: b\rdata: c\r\r", size) == [b"a", b"b\nc"]
    assert await _read(b"data: a\r\n\r\ndata: b\n\n", size) == [b"a", b"b"]


async def test_an_event_that_no_blank_line_ends_is_dropped() -> None:
    assert await _read(b"data: a\n\ndata: b", 100) == [b"a"]
    assert await _read(b"data: a\n\ndata: b\n", 100) == [b"a"]


async def test_an_endless_event_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 10000 bytes"):
        await _read(b"data: " + b"x" * 20_000 + b"\n\n", 1000)
