"""Server-sent events, split anywhere, are parsed as the openai SDK parses them."""

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
    return [data async for arrived in event_data(_chunks(stream, size), limit_bytes=10_000) for data in arrived]


@given(lines=st.lists(st.tuples(LINES, ENDS), max_size=20), size=st.integers(1, 7))
async def test_any_stream_is_parsed_as_by_the_openai_sdk(lines: list[tuple[str, str]], size: int) -> None:
    # "\r" followed by the "\n" of an empty line would be one line end.
    stream = "".join(line + ("\n" if end == "\r" else end) for line, end in lines).encode()
    expected = [event.data.encode() for event in SSEDecoder().iter_bytes(iter([stream])) if event.data]
    assert [data for data in await _read(stream, size) if data] == expected


@given(size=st.integers(1, 30))
async def test_carriage_returns_are_line_ends_wherever_the_stream_is_split(size: int) -> None:
    assert await _read(b"data: a\r\rdata: b\rdata: c\r\r", size) == [b"a", b"b\nc"]
    assert await _read(b"data: a\r\n\r\ndata: b\n\n", size) == [b"a", b"b"]


async def test_events_that_arrive_together_are_read_together() -> None:
    chunks = _chunks(b"data: a\n\ndata: b\n\ndata: c\n\n", 20)
    assert [arrived async for arrived in event_data(chunks, limit_bytes=10_000)] == [[b"a", b"b"], [b"c"]]


async def test_an_event_that_no_blank_line_ends_is_dropped() -> None:
    assert await _read(b"data: a\n\ndata: b", 100) == [b"a"]
    assert await _read(b"data: a\n\ndata: b\n", 100) == [b"a"]


@pytest.mark.parametrize("size", [1000, 100_000])
async def test_an_event_of_one_endless_line_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="longer than 10000 bytes"):
        await _read(b"data: " + b"x" * 20_000 + b"\n\n", size)


@pytest.mark.parametrize("line", [b"data: " + b"x" * 1000 + b"\n", b"data\n"])
async def test_an_event_of_endless_lines_is_refused_before_it_ends(line: bytes) -> None:
    limit_bytes, sent_bytes = 2**20, 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent_bytes
        piece = line * (2**16 // len(line))
        while sent_bytes < 30 * 2**20:
            sent_bytes += len(piece)
            yield piece

    with pytest.raises(ValueError, match=f"longer than {limit_bytes} bytes"):
        await anext(event_data(endless(), limit_bytes))
    assert sent_bytes < 2 * limit_bytes


async def test_many_events_together_may_be_longer_than_one() -> None:
    event = b"data: " + b"x" * 6_000
    assert await _read((event + b"\n\n") * 5, 100_000) == [event[6:]] * 5
