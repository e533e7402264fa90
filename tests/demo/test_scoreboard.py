"""What a demo shows while it runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from io import StringIO

from rich.console import Console

from clawloop.app.demo.plan import PlannedRun
from clawloop.app.demo.recipes import Method
from clawloop.app.demo.scoreboard import ScoreLines, ScoreTable
from clawloop.app.local.supervision.supervisor import PartState, PartStatus
from tests.demo.test_report import evaluated

ONE, TWO = PlannedRun(1, Method.COMBINED), PlannedRun(2, Method.BINARY)


def console(width: int = 80) -> tuple[Console, StringIO]:
    output = StringIO()
    return Console(file=output, width=width), output


def test_the_column_names_are_printed_once() -> None:
    on, output = console()
    board = ScoreLines(on)
    for row in evaluated(0.5, 0.95):
        board.add_evaluation(ONE, replace(row, reward=-0.25))
    head, first, second = output.getvalue().splitlines()
    assert head.split()[:3] == ["user", "method", "version"]
    assert second.split() == ["1", "combined", "1", "8", "-0.25", "95%", "1", "10"]
    assert len(first) == len(second)


def test_a_run_with_a_model_shows_facts_and_what_replies_are_like() -> None:
    on, output = console()
    [row] = evaluated(0.5)
    ScoreLines(on).add_evaluation(
        PlannedRun(1, Method.HINDSIGHT), replace(row, exact=0.925, words=61.6, cut=0.25, loops=2)
    )
    head, shown = output.getvalue().splitlines()
    assert head.split() == (
        ["user", "version", "interactions", "match", "facts", "words", "cut", "loops", "failed", "seconds"]
    )
    assert shown.split()[3:8] == ["50%", "92%", "62", "25%", "2"]
    assert len(head) <= 80


def test_a_table_has_a_bar_where_the_terminal_has_room_for_one() -> None:
    [row] = evaluated(0.5)
    for width, bars in ((80, 0), (100, 1)):
        on, output = console(width)
        board = ScoreTable(on)
        board.add_evaluation(ONE, replace(row, words=61.6, cut=0.25, loops=2))
        on.print(board)
        assert output.getvalue().count("█·") == bars
        assert "seconds" in output.getvalue()
        assert max(map(len, output.getvalue().splitlines())) <= width


def test_the_table_shows_all_rows_of_the_current_run_and_the_last_of_others() -> None:
    on, output = console()
    board = ScoreTable(on)
    for run in (ONE, TWO):
        for row in evaluated(0.5, 0.7, 0.95):
            board.add_evaluation(run, row)
    board.status(TWO, "chatting")
    on.print(board)
    board.changed(PartStatus("vllm", PartState.STOPPED, "", "", datetime.now().astimezone(), 0))
    assert all("chatting" not in str(part) for part in board.__rich__().renderables)
    rows = [line.split() for line in output.getvalue().splitlines()]
    assert [row[:2] for row in rows[1:-1]] == [["1", "combined"], ["2", "binary"], ["2", "binary"], ["2", "binary"]]
    assert rows[-1][:2] == ["chatting", "…"]


def test_starting_parts_are_named_and_failures_stay() -> None:
    on, output = console()
    board = ScoreTable(on)
    now = datetime.now().astimezone()
    board.changed(PartStatus("vllm", PartState.STARTING, "", "loading weights", now, 0))
    board.changed(PartStatus("postgres", PartState.STARTING, "", "", now, 0))
    board.changed(PartStatus("judge", PartState.WAITING, "", "ended with exit code 1; again in 1 s", now, 1))
    on.print(board)
    printed = output.getvalue()
    assert "starting vllm (loading weights), postgres" in printed
    assert "judge waiting: ended with exit code 1; again in 1 s" in printed
