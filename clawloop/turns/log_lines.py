"""Splits a log that arrives in pieces into its lines, with no more than one line in memory."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

from clawloop.turns.logged import LONGEST_LINE


async def log_lines(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The lines of a log, without their ends; of one that is too long to be used only its beginning."""
    begun = bytearray()
    async for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield bytes(begun + _within(end, begun)) if begun else end
            begun.clear()
        begun += _within(rest, begun)
    if begun:
        yield bytes(begun)


def _within(piece: bytes, begun: bytearray) -> bytes:
    """As much of a piece as shows that its line is too long."""
    return piece[: max(0, LONGEST_LINE + 1 - len(begun))]
