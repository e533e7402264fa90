"""Shows the progress of a demo: a live table on a terminal, lines anywhere else.

Satisfies `experiment.DemoBoard`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clawloop.app.demo.plan import PlannedRun
from clawloop.app.demo.recipes import Method
from clawloop.app.demo.report import GOAL, Evaluation
from clawloop.app.local.supervision.supervisor import LineBoard, PartState, PartStatus

# Both fit a terminal of 80 columns.
_TOY_COLUMNS = ("user", "method", "version", "interactions", "reward", "match", "failed", "seconds")
_TASTE_COLUMNS = ("user", "version", "interactions", "match", "facts", "words", "cut", "loops", "failed", "seconds")
_TEXT_COLUMNS = ("user", "method")
_METHOD_WIDTH = max(map(len, Method))
_BAR_WIDTH, _LEAST_BAR = 20, 5
_GAP = "  "


def columns(row: Evaluation) -> tuple[str, ...]:
    """The names of an evaluation's cells: of the toy, or of a user with a taste."""
    return _TOY_COLUMNS if row.words is None else _TASTE_COLUMNS


def cells(run: PlannedRun, row: Evaluation) -> tuple[str, ...]:
    """Format an evaluation as cells in the order of `columns`."""
    found = {
        "user": str(run.seed),
        "method": str(run.method),
        "version": str(row.version),
        "interactions": str(row.interactions),
        "reward": "" if row.reward is None else f"{row.reward:+.2f}",
        "match": f"{row.match:.0%}",
        "facts": f"{row.exact:.0%}",
        "words": "" if row.words is None else f"{row.words:.0f}",
        "cut": "" if row.cut is None else f"{row.cut:.0%}",
        "loops": "" if row.loops is None else str(row.loops),
        "failed": str(row.failed),
        "seconds": f"{row.seconds:.0f}",
    }
    return tuple(found[name] for name in columns(row))


def _line(names: Sequence[str], shown: Sequence[str]) -> str:
    """The cells as wide as their columns."""
    widths = [_METHOD_WIDTH if name == "method" else len(name) for name in names]
    return _GAP.join(f"{cell:>{width}}" for width, cell in zip(widths, shown, strict=True))


class ScoreLines(LineBoard):
    """Prints a line for each event, with the seconds since the demo began; does not show the current status."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._began = time.monotonic()
        self._has_header = False

    def changed(self, status: PartStatus) -> None:
        if status.state in (PartState.READY, PartState.EXTERNAL, PartState.WAITING, PartState.FAILED):
            self.say(f"{status.name} {status.state}{': ' if status.detail else ''}{status.detail}")

    def say(self, line: str) -> None:
        self._print(f"{time.monotonic() - self._began:4.0f} s  {line}")

    def add_evaluation(self, run: PlannedRun, row: Evaluation) -> None:
        names = columns(row)
        if not self._has_header:
            self._print(_line(names, names))
            self._has_header = True
        self._print(_line(names, cells(run, row)))

    def status(self, run: PlannedRun, text: str) -> None:
        pass


class ScoreTable(ScoreLines):
    """A status line and a table of evaluations; failures are printed above the table and stay."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._parts: dict[str, PartStatus] = {}
        self._rows: list[tuple[PlannedRun, Evaluation]] = []
        self._status = "starting"
        self._status_since = time.monotonic()

    def changed(self, status: PartStatus) -> None:
        self._parts[status.name] = status
        if status.state in (PartState.WAITING, PartState.FAILED):
            super().changed(status)
        starting = [part for part in self._parts.values() if part.state is PartState.STARTING]
        if all(part.state in (PartState.STOPPED, PartState.FAILED) for part in self._parts.values()):
            self._set_status("")
        elif status.state is PartState.STOPPING:
            self._set_status("stopping")
        elif starting and not self._rows:
            details = {part.name: part.detail.partition(",")[0] for part in starting}
            parts = ", ".join(f"{name} ({detail})" if detail else name for name, detail in details.items())
            self._status = f"starting {parts}"

    def add_evaluation(self, run: PlannedRun, row: Evaluation) -> None:
        self._rows.append((run, row))

    def status(self, run: PlannedRun, text: str) -> None:
        self._set_status(text)

    def __rich__(self) -> Group:
        renderables: list[RenderableType] = [self._table()] if self._rows else []
        if self._status:
            seconds = time.monotonic() - self._status_since
            renderables.append(
                Text(f"{self._status} … {seconds:.0f} s", style="dim", overflow="ellipsis", no_wrap=True)
            )
        return Group(*renderables)

    def _set_status(self, text: str) -> None:
        if text != self._status:
            self._status, self._status_since = text, time.monotonic()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        names = columns(self._rows[0][1])
        for name in names:
            table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right")
        room = self._console.width - len(_line(names, names) + _GAP)
        bar_width = min(_BAR_WIDTH, room) if room >= _LEAST_BAR else 0
        if bar_width:
            table.add_column()
        current = self._rows[-1][0]
        last = dict(self._rows)  # only the last row of a finished run, so that the table fits the screen
        for run, row in self._rows:
            if run != current and row is not last[run]:
                continue
            bar = "█" * round(row.match * bar_width)
            style = "green" if row.match >= GOAL else "yellow"
            shown = [Text(bar.ljust(bar_width, "·"), style=style)] if bar_width else []
            table.add_row(*cells(run, row), *shown)
        return table
