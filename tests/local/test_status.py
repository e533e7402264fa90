"""Status is dated lines in a file and a table on a terminal."""

from __future__ import annotations

from datetime import datetime, timedelta
from io import StringIO

import pytest
from rich.console import Console

from clawloop.local.supervision.part import PartState, PartStatus
from clawloop.local.supervision.status import describe, shown


def status(state: PartState, detail: str = "", restarts: int = 0) -> PartStatus:
    since = datetime.now().astimezone() - timedelta(minutes=3)
    return PartStatus("vllm", state, "http://127.0.0.1:8100", detail, since, restarts)


@pytest.mark.parametrize(
    ("part", "line"),
    [
        (status(PartState.STARTING, "loading weights"), "vllm starting: loading weights"),
        (status(PartState.READY), "vllm ready at http://127.0.0.1:8100"),
        (status(PartState.READY, restarts=2), "vllm ready at http://127.0.0.1:8100 (restarts: 2)"),
        (
            status(PartState.WAITING, "ended with exit code 1; again in 4 s"),
            "vllm waiting: ended with exit code 1; again in 4 s",
        ),
    ],
)
def test_a_part_in_one_line(part: PartStatus, line: str) -> None:
    assert describe(part) == line


def test_off_a_terminal_every_change_is_a_dated_line() -> None:
    output = StringIO()
    with shown(Console(file=output)) as board:
        board.changed(status(PartState.STARTING))
        board.say("gateway [bold]http://127.0.0.1:30000/v1[/bold] " + "x" * 200)
    first, second = output.getvalue().splitlines()
    assert datetime.fromisoformat(first.split(" ", 1)[0]).tzinfo is not None
    assert first.endswith(" vllm starting")
    assert second.endswith(" gateway [bold]http://127.0.0.1:30000/v1[/bold] " + "x" * 200)


def test_on_a_terminal_there_is_a_table_and_failures_stay_above_it() -> None:
    output = StringIO()
    with shown(Console(file=output, force_terminal=True, width=120)) as board:
        board.changed(status(PartState.READY))
        board.changed(status(PartState.WAITING, "was ended by SIGKILL; again in 0.5 s", restarts=1))
    text = output.getvalue()
    assert "vllm waiting: was ended by SIGKILL; again in 0.5 s" in text
    assert "http://127.0.0.1:8100" in text
    assert "3 min" in text
