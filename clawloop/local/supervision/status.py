"""Displays the status of the parts: a live table on a terminal, dated lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clawloop.local.supervision.part import PartState, PartStatus

_COLOURS = {
    PartState.STARTING: "yellow",
    PartState.READY: "green",
    PartState.WAITING: "red",
    PartState.STOPPING: "yellow",
    PartState.STOPPED: "dim",
    PartState.FAILED: "bold red",
    PartState.EXTERNAL: "cyan",
}
# Enough for a person; more would take processor time from the parts.
_DRAWS_PER_SECOND = 2


class Board(Protocol):
    """Displays status changes and messages."""

    def changed(self, status: PartStatus) -> None: ...

    def say(self, line: str) -> None: ...


@contextmanager
def status_board(console: Console) -> Iterator[Board]:
    """A table on a terminal, else dated lines."""
    if not console.is_terminal:
        yield LineBoard(console)
        return
    table = TableBoard(console)
    with Live(table, console=console, refresh_per_second=_DRAWS_PER_SECOND):
        yield table


class LineBoard:
    """Writes a dated line for every change."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def changed(self, status: PartStatus) -> None:
        self.say(describe(status))

    def say(self, line: str) -> None:
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        self._console.print(f"{now} {line}", markup=False, highlight=False, soft_wrap=True)


class TableBoard:
    """A table of all parts. Failures are also written above the table, where they stay."""

    def __init__(self, console: Console) -> None:
        self._lines = LineBoard(console)
        self._parts: dict[str, PartStatus] = {}

    def changed(self, status: PartStatus) -> None:
        self._parts[status.name] = status
        if status.state in (PartState.WAITING, PartState.FAILED):
            self._lines.changed(status)

    def say(self, line: str) -> None:
        self._lines.say(line)

    def __rich__(self) -> Table:
        table = Table("part", "state", "address", "for", "restarts", "", box=None, pad_edge=False)
        now = datetime.now().astimezone()
        for status in self._parts.values():
            table.add_row(
                status.name,
                Text(status.state, style=_COLOURS[status.state]),
                Text(status.address),
                _duration(int((now - status.since).total_seconds())),
                str(status.restarts or ""),
                Text(status.detail, overflow="ellipsis", no_wrap=True),
            )
        return table


def describe(status: PartStatus) -> str:
    """The status as one line."""
    line = f"{status.name} {status.state}"
    if status.state in (PartState.READY, PartState.EXTERNAL):
        line += f" at {status.address}"
    if status.detail:
        line += f": {status.detail}"
    if status.restarts and status.state is PartState.READY:
        line += f" (restarts: {status.restarts})"
    return line


def _duration(seconds: int) -> str:
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"
