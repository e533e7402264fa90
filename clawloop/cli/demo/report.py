"""The command `clawloop demo report`. Heavy modules are imported only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clawloop.errors import SetupError


def report_command(
    files: Annotated[list[Path], typer.Argument(help="The demo-report.json files to join; no run may occur twice.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the joined demo-report.json and demo-report.png.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print rows as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the joined report.")] = False,
) -> None:
    """Show the reports of demos, joined into one, so that a long comparison can run in parts."""
    from clawloop.cli.demo.run import print_report
    from clawloop.demo.report_formats import read_report
    from clawloop.demo.run import DemoResults, write_report

    try:
        reports = [read_report(path) for path in files]
        runs = [run for part, _ in reports for run in part]
        names = [f"{run.method} with seed {run.seed}" for run in runs]
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            raise SetupError(f"{duplicates[0]} is in the reports twice: each run may occur only once")
        if not runs:
            raise SetupError("the reports contain no run")
        seconds = sum(part_seconds for _, part_seconds in reports)
        if out is not None:
            write_report(out, DemoResults(tuple(runs), seconds))
    except SetupError as error:
        typer.echo(f"clawloop: {error}", err=True)
        raise typer.Exit(1) from None
    print_report(runs, seconds, as_json=as_json, markdown=markdown)
