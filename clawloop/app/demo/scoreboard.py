"""Shows the progress of a demo: a live table on a terminal, lines anywhere else.

Satisfies `experiment.DemoBoard`.
"""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from clawloop.app.demo.plan import PlannedRun
from clawloop.app.demo.report import GOAL, Evaluation
from clawloop.app.local.supervision.supervisor import LineBoard, PartState, PartStatus

_COLUMNS = ("user", "method", "step", "version", "interactions", "reward", "match", "requests failed", "seconds")
_TASTE_COLUMNS = ("facts", "words", "cut", "loops")
"""Further ones, of a run with a model that is no toy."""
_TEXT_COLUMNS = ("user", "method")
_BAR_WIDTH = 20


def columns(row: Evaluation) -> tuple[str, ...]:
    """The names of an evaluation's cells."""
    return _COLUMNS if row.words is None else (*_COLUMNS, *_TASTE_COLUMNS)


def cells(run: PlannedRun, row: Evaluation) -> tuple[str, ...]:
    """Format an evaluation as cells in the order of `columns`."""
    taste = () if row.words is None else (f"{row.exact:.0%}", f"{row.words:.0f}", f"{row.cut:.0%}", str(row.loops))
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
        *taste,
    )


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
            self._print("  ".join(names))
            self._has_header = True
        self._print("  ".join(f"{cell:>{len(name)}}" for name, cell in zip(names, cells(run, row), strict=True)))

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
        for name in columns(self._rows[0][1]):
            table.add_column(name, justify="left" if name in _TEXT_COLUMNS else "right")
        table.add_column()
        current = self._rows[-1][0]
        last = dict(self._rows)  # only the last row of a finished run, so that the table fits the screen
        for run, row in self._rows:
            if run != current and row is not last[run]:
                continue
            bar = "█" * round(row.match * _BAR_WIDTH)
            style = "green" if row.match >= GOAL else "yellow"
            table.add_row(*cells(run, row), Text(bar.ljust(_BAR_WIDTH, "·"), style=style))
        return table
