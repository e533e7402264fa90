"""Shows a demo as it goes: a live table on a terminal, lines anywhere else.

Satisfies `clawloop.local.supervision.status.Board` and `experiment.Scoreboard`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from clawloop.demo.plan import PlannedRun
from clawloop.demo.report import GOAL, Evaluated
from clawloop.local.supervision.part import PartState, PartStatus

_COLUMNS = ("user", "method", "step", "version", "interactions", "reward", "match", "requests failed", "seconds")
_WORDS = ("user", "method")
# Enough to see that it lives; more only costs the machine that learns.
_DRAWS_PER_SECOND = 2
_BAR = 20


class DemoBoard(Protocol):
    """What both boards do."""

    def changed(self, status: PartStatus) -> None: ...

    def say(self, line: str) -> None: ...

    def evaluated(self, run: PlannedRun, row: Evaluated) -> None: ...

    def doing(self, run: PlannedRun, words: str) -> None: ...


@contextmanager
def shown(console: Console) -> Iterator[DemoBoard]:
    """A board that fits the console."""
    if not console.is_terminal:
        yield LineBoard(console)
        return
    board = TableBoard(console)
    with Live(board, console=console, refresh_per_second=_DRAWS_PER_SECOND):
        yield board


def cells(run: PlannedRun, row: Evaluated) -> tuple[str, ...]:
    """One row in words, in the order of the columns."""
    return (
        str(run.seed),
        str(run.method),
        "" if row.step == 0 else str(row.step),
        str(row.version),
        str(row.interactions),
        "" if row.reward is None else f"{row.reward:+.2f}",
        f"{row.match:.0%}",
        str(row.failed),
        f"{row.seconds:.0f}",
    )


class LineBoard:
    """Writes what happens, one line each, and nothing about what is going on."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        self._headed = False

    def changed(self, status: PartStatus) -> None:
        if status.state in (PartState.READY, PartState.EXTERNAL, PartState.WAITING, PartState.FAILED):
            self.say(f"{status.name} {status.state}{': ' if status.detail else ''}{status.detail}")

    def say(self, line: str) -> None:
        self._print(f"{time.monotonic() - self._began:4.0f} s  {line}")

    def evaluated(self, run: PlannedRun, row: Evaluated) -> None:
        if not self._headed:
            self._print("  ".join(_COLUMNS))
            self._headed = True
        self._print("  ".join(f"{cell:>{len(name)}}" for name, cell in zip(_COLUMNS, cells(run, row), strict=True)))

    def doing(self, run: PlannedRun, words: str) -> None:
        pass

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class TableBoard:
    """A line about what goes on, and a table of what was measured; problems are written above, where they stay."""

    def __init__(self, console: Console) -> None:
        self._lines = LineBoard(console)
        self._parts: dict[str, PartStatus] = {}
        self._rows: list[tuple[PlannedRun, Evaluated]] = []
        self._doing = "starting"
        self._since = time.monotonic()

    def changed(self, status: PartStatus) -> None:
        self._parts[status.name] = status
        if status.state in (PartState.WAITING, PartState.FAILED):
            self._lines.changed(status)
        starting = [part for part in self._parts.values() if part.state is PartState.STARTING]
        if all(part.state in (PartState.STOPPED, PartState.FAILED) for part in self._parts.values()):
            self._now("")
        elif status.state is PartState.STOPPING:
            self._now("stopping")
        elif starting and not self._rows:
            parts = ", ".join(f"{part.name} ({part.detail})" if part.detail else part.name for part in starting)
            self._doing = f"starting {parts}"

    def say(self, line: str) -> None:
        self._lines.say(line)

    def evaluated(self, run: PlannedRun, row: Evaluated) -> None:
        self._rows.append((run, row))

    def doing(self, run: PlannedRun, words: str) -> None:
        self._now(words)

    def __rich__(self) -> Group:
        shown: list[RenderableType] = [self._table()] if self._rows else []
        if self._doing:
            seconds = time.monotonic() - self._since
            shown.append(Text(f"{self._doing} … {seconds:.0f} s", style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*shown)

    def _now(self, words: str) -> None:
        if words != self._doing:
            self._doing, self._since = words, time.monotonic()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(name, justify="left" if name in _WORDS else "right")
        table.add_column()
        current = self._rows[-1][0]
        last = dict(self._rows)  # of runs that are over only the end, or the table would not fit a screen
        for run, row in self._rows:
            if run != current and row is not last[run]:
                continue
            bar = "█" * round(row.match * _BAR)
            style = "green" if row.match >= GOAL else "yellow"
            table.add_row(*cells(run, row), Text(bar.ljust(_BAR, "·"), style=style))
        return table
