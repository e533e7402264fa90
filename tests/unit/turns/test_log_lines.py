"""A log that arrives in pieces has the same lines, and no line takes more memory than one that can be used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest

from clawloop.turns import log_lines as splitting
from clawloop.turns.log_lines import log_lines


async def arriving(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
async def test_lines_do_not_depend_on_the_pieces(size: int) -> None:
    log = b"first\n\nsecond line\nlast without an end"
    pieces = [log[at : at + size] for at in range(0, len(log), size)]
    assert [line async for line in log_lines(arriving(pieces))] == log.split(b"\n")


async def test_of_a_line_that_is_too_long_only_the_beginning_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "LONGEST_LINE", 10)
    pieces = [b"a" * 8, b"a" * 8, b"a" * 8 + b"\nshort\n", b"b" * 11 + b"\n"]
    lines = [line async for line in log_lines(arriving(pieces))]
    assert lines[:2] == [b"a" * 11, b"short"]
    assert len(lines[2]) == 11
