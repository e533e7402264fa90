"""`clawloop demo run` as a person types it.

Knows nothing about how the demo is made. Imports what is heavy only when it runs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.up import Port
from clawloop.errors import SetupError

if TYPE_CHECKING:
    from clawloop.demo.report import RunReport
    from clawloop.local.up import Prepare
    from clawloop.settings import Settings

INTERRUPTED = 130  # as shells count SIGINT


def tell(runs: Sequence[RunReport], seconds: float, *, as_json: bool, markdown: bool) -> None:
    """What was found, to people; to stderr if stdout is for JSON or Markdown."""
    from clawloop.demo import report_forms

    for line in (*report_forms.as_lines(runs), report_forms.in_one_line(runs, seconds)):
        typer.echo(line, err=as_json or markdown)
    if as_json:
        typer.echo(report_forms.as_json(runs, seconds), nl=False)
    if markdown:
        typer.echo(report_forms.as_markdown(runs), nl=False)


def run_command(read_settings: Callable[[], Settings], load_prepare: Callable[[], Prepare]) -> Callable[..., None]:
    """The Typer command; see `clawloop.cli.up.up_command`."""

    def run(
        seed: Annotated[str | None, typer.Option(help="Whose hidden taste the synthetic user has; 1.")] = None,
        seeds: Annotated[str | None, typer.Option(help="How many (10 is 1 to 10), or a list: 3,5,8.")] = None,
        methods: Annotated[str, typer.Option(help="binary, opd, combined; several with commas.")] = "combined",
        interactions: Annotated[
            int | None, typer.Option(help="Requests of each run that may be learned from; 64, with --flip 192.")
        ] = None,
        flip: Annotated[
            str | None,
            typer.Option(
                help="Half-way the user comes to like the other style: of code, length, tone (commas), or all."
            ),
        ] = None,
        measure_every: Annotated[
            int,
            typer.Option(help="After 128 interactions measure only every so manieth version, which saves time."),
        ] = 1,
        paced: Annotated[
            bool,
            typer.Option(help="Between two rounds of sessions the user waits until what was said is learned."),
        ] = True,
        keep: Annotated[bool, typer.Option("--keep", help="Leave everything running afterwards.")] = False,
        data: Annotated[Path | None, typer.Option(help="The demo takes its subfolder `demo`.")] = None,
        out: Annotated[Path, typer.Option(help="Where demo-report.json and demo-report.png go.")] = Path(),
        port: Port = 0,
        temporal_port: Port = 0,
        temporal_ui_port: Port = 0,
        engine_port: Port = 0,
        markdown: Annotated[bool, typer.Option("--markdown", help="Print a row for each run, as Markdown.")] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the report; what happens goes to stderr.")] = False,
        began: Annotated[float | None, typer.Option(hidden=True, help="When `make demo` began; Unix time.")] = None,
    ) -> None:
        """Start everything, let a synthetic user with a hidden taste chat, and show the model learning it."""
        from rich.console import Console

        from clawloop.demo.plan import plan
        from clawloop.demo.recipes import Method, demo_recipe
        from clawloop.demo.run import DemoOptions
        from clawloop.demo.run import run as run_demo
        from clawloop.demo.scoreboard import shown

        try:
            batch = demo_recipe(Method.COMBINED).train.batch_samples
            options = DemoOptions(
                plan=plan(
                    seeds,
                    seed,
                    methods,
                    interactions,
                    paced=paced,
                    batch=batch,
                    flip=flip,
                    measure_every=measure_every,
                ),
                data=(data or read_settings().data).absolute(),
                out=out.absolute(),
                environment=dict(os.environ),
                keep=keep,
                began=began or time.time(),
                port=port,
                temporal_port=temporal_port,
                temporal_ui_port=temporal_ui_port,
                engine_port=engine_port,
            )
            with shown(Console(stderr=as_json or markdown)) as board:
                findings = asyncio.run(run_demo(options, board, load_prepare()))
        except SetupError as error:
            typer.echo(f"clawloop: {error}", err=True)
            raise typer.Exit(1) from None
        finished = 0 if findings is None else len(findings.runs)
        if findings is None or finished < len(options.plan.runs):
            has = (
                f"{finished} finished of {len(options.plan.runs)} are in the report"
                if finished
                else "there is no report"
            )
            typer.echo(f"clawloop: stopped before the end; nothing is left running, and {has}", err=True)
            raise typer.Exit(INTERRUPTED)
        tell(findings.runs, findings.seconds, as_json=as_json, markdown=markdown)
        if stopped := [run.stopped for run in findings.runs if run.stopped is not None]:
            several = "" if len(findings.runs) == 1 else f"{len(stopped)} of {len(findings.runs)} runs ended early: "
            typer.echo(f"clawloop: {several}{stopped[0]}", err=True)
            raise typer.Exit(1)

    return run
