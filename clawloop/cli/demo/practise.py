"""`clawloop demo run --environment NAME`: a toy model that learns from episodes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from clawloop.demo.practice.practise import PracticeOptions
    from clawloop.local.up import Prepare

MINUTES = 40.0


def run_practice(options: PracticeOptions, prepare: Prepare, *, as_json: bool) -> int:
    """Execute the runs and print their report; returns how many finished.

    Raises:
        SetupError: a part cannot start, or no sandboxes can be made.
    """
    from rich.console import Console

    from clawloop.demo.practice import report as reports
    from clawloop.demo.practice.practise import practise
    from clawloop.demo.scoreboard import LineBoard

    finished = asyncio.run(practise(options, LineBoard(Console(stderr=as_json)), prepare))
    for run in finished:
        for line in reports.lines(run):
            typer.echo(line, err=as_json)
    if as_json and finished:
        typer.echo(reports.as_json(finished), nl=False)
    return len(finished)
