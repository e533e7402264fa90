"""The status board: dated lines in a file, a table on a terminal."""

from __future__ import annotations

from datetime import datetime, timedelta
from io import StringIO

import pytest
from rich.console import Console

from clawloop.app.local.supervision.supervisor import LineBoard, PartState, PartStatus, TableBoard, describe, open_board


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
            status(PartState.WAITING, "ended with exit code 1; restart in 4 s"),
            "vllm waiting: ended with exit code 1; restart in 4 s",
        ),
    ],
)
def test_a_status_as_one_line(part: PartStatus, line: str) -> None:
    assert describe(part) == line


def test_without_a_terminal_every_change_is_a_dated_line() -> None:
    output = StringIO()
    with open_board(Console(file=output), LineBoard, TableBoard) as board:
        board.changed(status(PartState.STARTING))
        board.say("gateway [bold]http://127.0.0.1:30000/v1[/bold] " + "x" * 200)
    first, second = output.getvalue().splitlines()
    assert datetime.fromisoformat(first.split(" ", 1)[0]).tzinfo is not None
    assert first.endswith(" vllm starting")
    assert second.endswith(" gateway [bold]http://127.0.0.1:30000/v1[/bold] " + "x" * 200)


def test_a_terminal_shows_a_table_with_failures_above_it() -> None:
    output = StringIO()
    with open_board(Console(file=output, force_terminal=True, width=120), LineBoard, TableBoard) as board:
        board.changed(status(PartState.READY))
        board.changed(status(PartState.WAITING, "was ended by SIGKILL; restart in 0.5 s", restarts=1))
    text = output.getvalue()
    assert "vllm waiting: was ended by SIGKILL; restart in 0.5 s" in text
    assert "http://127.0.0.1:8100" in text
    assert "3 min" in text
