"""`clawloop demo report` as a person types it: reports of several demos as one.

Imports what is heavy only when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from clawloop.errors import SetupError


def report_command(
    files: Annotated[list[Path], typer.Argument(help="demo-report.json of each; no run twice.")],
    out: Annotated[Path | None, typer.Option(help="Write demo-report.json and demo-report.png here.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print rows as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the joined report.")] = False,
) -> None:
    """Show what demos found; several are joined, so that a long comparison can be made in parts."""
    from clawloop.cli.demo.run import tell
    from clawloop.demo.report_forms import read_report
    from clawloop.demo.run import Findings, write_report

    try:
        read = [read_report(path) for path in files]
        runs = [run for found, _ in read for run in found]
        names = [f"{run.method} with seed {run.seed}" for run in runs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SetupError(f"{twice[0]} is in the reports twice: give each run once")
        if not runs:
            raise SetupError("no run is in the reports")
        seconds = sum(of_all for _, of_all in read)
        if out is not None:
            write_report(out, Findings(tuple(runs), seconds))
    except SetupError as error:
        typer.echo(f"clawloop: {error}", err=True)
        raise typer.Exit(1) from None
    tell(runs, seconds, as_json=as_json, markdown=markdown)
