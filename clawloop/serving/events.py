"""Parses server-sent events, as far as OpenAI streams use them: `data:` lines, comments, blank lines.

This is the hot path of streaming: each byte is scanned once, in C.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

_LINE_END = re.compile(rb"\r\n|\n|\r")
_LINE_END_SAFE = re.compile(rb"\r\n|\n|\r(?=[^\n])")  # a trailing \r may be half of \r\n


async def event_data(chunks: AsyncIterator[bytes], limit_bytes: int) -> AsyncIterator[list[bytes]]:
    """The data of the events that each chunk ends, joined by newlines where an event had several lines.

    Chunks that end no event with data are skipped.

    Args:
        chunks: the stream, split anywhere.
        limit_bytes: longest event accepted, however many lines it has.

    Raises:
        ValueError: an event is longer than `limit_bytes`.
    """
    pending = b""
    data: list[bytes] = []
    size_bytes = 0  # of the lines in `data`, as received
    async for chunk in chunks:
        received = pending + chunk
        # Without a carriage return, as engines send them, in a quarter of the time.
        *lines, pending = _LINE_END_SAFE.split(received) if b"\r" in received else received.split(b"\n")
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[6:] if line[5:6] == b" " else line[5:])
                size_bytes += len(line)
            elif line == b"data":
                data.append(b"")
                size_bytes += len(line)
            elif not line and data:
                _check_size(limit_bytes, size_bytes)
                events.append(b"\n".join(data))
                data, size_bytes = [], 0
        if events:
            yield events
        # Also before the event ends: its end may never come.
        _check_size(limit_bytes, size_bytes + len(pending))
    # A trailing \r was a line end. An event that no blank line ended is dropped, as the specification demands.
    *lines, _ = _LINE_END.split(pending)
    if data and lines and not lines[0]:
        yield [b"\n".join(data)]


def _check_size(limit_bytes: int, size_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise ValueError(f"an event is longer than {limit_bytes} bytes")
