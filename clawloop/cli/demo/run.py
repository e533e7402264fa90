"""The command `clawloop demo run`. Heavy modules are imported only when it runs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.cli.demo.practise import MINUTES, run_practice
from clawloop.cli.up import Port
from clawloop.errors import SetupError

if TYPE_CHECKING:
    from clawloop.demo.report import RunReport
    from clawloop.local.up import Prepare
    from clawloop.settings import Settings

INTERRUPTED = 130  # the exit code of shells for SIGINT


def print_report(runs: Sequence[RunReport], seconds: float, *, as_json: bool, markdown: bool) -> None:
    """Print the results; the text goes to stderr if stdout is for JSON or Markdown."""
    from clawloop.demo import report_formats

    for line in (*report_formats.comparison_lines(runs), report_formats.summary_line(runs, seconds)):
        typer.echo(line, err=as_json or markdown)
    if as_json:
        typer.echo(report_formats.as_json(runs, seconds), nl=False)
    if markdown:
        typer.echo(report_formats.as_markdown(runs), nl=False)


def run_command(read_settings: Callable[[], Settings], load_prepare: Callable[[], Prepare]) -> Callable[..., None]:
    """Return the Typer command; see `clawloop.cli.up.up_command`."""

    def run(
        environment: Annotated[
            str | None,
            typer.Option(help="Instead of the user's chat: learn from episodes; tool-call, terminal or swe."),
        ] = None,
        versions: Annotated[
            int | None,
            typer.Option(
                min=1,
                help="With --environment: a run ends at this version, or after 40 minutes. Default: the toy's own.",
            ),
        ] = None,
        seed: Annotated[
            str | None, typer.Option(help="Seed of the synthetic user's hidden preference; 1 by default.")
        ] = None,
        seeds: Annotated[str | None, typer.Option(help="Number of seeds (10 for 1 to 10), or a list: 3,5,8.")] = None,
        methods: Annotated[str, typer.Option(help="binary, opd, combined; comma-separated.")] = "combined",
        interactions: Annotated[
            int | None, typer.Option(help="Main turns of each run; 64 by default, 192 with --flip.")
        ] = None,
        flip: Annotated[
            str | None,
            typer.Option(help="Flip the user's preference half-way: code, length, tone (comma-separated), or all."),
        ] = None,
        measure_every: Annotated[
            int,
            typer.Option(help="After 128 interactions evaluate only every n-th version, which saves time."),
        ] = 1,
        paced: Annotated[
            bool,
            typer.Option(help="Let the user wait between two rounds of sessions until every turn is learned."),
        ] = True,
        keep: Annotated[bool, typer.Option("--keep", help="Leave all parts running afterwards.")] = False,
        faults: Annotated[
            bool, typer.Option("--faults", help="Kill the parts one after another while it learns.")
        ] = False,
        data: Annotated[Path | None, typer.Option(help="Data folder; the demo uses its subfolder `demo`.")] = None,
        out: Annotated[Path, typer.Option(help="Folder for demo-report.json and demo-report.png.")] = Path(),
        port: Port = 0,
        temporal_port: Port = 0,
        temporal_ui_port: Port = 0,
        engine_port: Port = 0,
        markdown: Annotated[bool, typer.Option("--markdown", help="Print the report as Markdown.")] = False,
        as_json: Annotated[
            bool, typer.Option("--json", help="Print the report as JSON; progress goes to stderr.")
        ] = False,
        began: Annotated[float | None, typer.Option(hidden=True, help="Unix time at which `make demo` began.")] = None,
    ) -> None:
        """Start all parts, let a synthetic user with a hidden preference chat, and show the model learning it."""
        from rich.console import Console

        from clawloop.demo.plan import plan
        from clawloop.demo.recipes import Method, demo_recipe
        from clawloop.demo.run import DemoOptions
        from clawloop.demo.run import run as run_demo
        from clawloop.demo.scoreboard import open_board

        try:
            if environment is not None:
                if interactions is not None or flip is not None or keep or faults or markdown:
                    raise SetupError("--environment: leave out --interactions, --flip, --keep, --faults, --markdown")
                from clawloop.demo.practice.practise import PracticeOptions
                from clawloop.demo.practice.toys import toy_of

                toy = toy_of(environment)
                chosen = plan(seeds, seed, methods, None, paced=paced, batch=1).runs
                practice = PracticeOptions(
                    toy=toy,
                    seeds=list(dict.fromkeys(each.seed for each in chosen)),
                    versions=versions or toy.versions,
                    minutes=MINUTES,
                    data=(data or read_settings().data).absolute(),
                    out=out.absolute(),
                    environment=dict(os.environ),
                    began=began or time.time(),
                    port=port,
                    temporal_port=temporal_port,
                    temporal_ui_port=temporal_ui_port,
                    engine_port=engine_port,
                )
                finished = run_practice(practice, load_prepare(), as_json=as_json)
                raise typer.Exit(0 if finished else INTERRUPTED)
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
                faults=faults,
                began=began or time.time(),
                port=port,
                temporal_port=temporal_port,
                temporal_ui_port=temporal_ui_port,
                engine_port=engine_port,
            )
            with open_board(Console(stderr=as_json or markdown)) as board:
                results = asyncio.run(run_demo(options, board, load_prepare()))
        except SetupError as error:
            typer.echo(f"clawloop: {error}", err=True)
            raise typer.Exit(1) from None
        finished = 0 if results is None else len(results.runs)
        if results is None or finished < len(options.plan.runs):
            report = (
                f"{finished} finished of {len(options.plan.runs)} are in the report"
                if finished
                else "there is no report"
            )
            typer.echo(f"clawloop: stopped before the end; nothing is left running, and {report}", err=True)
            raise typer.Exit(INTERRUPTED)
        print_report(results.runs, results.seconds, as_json=as_json, markdown=markdown)
        if stopped := [run.stopped for run in results.runs if run.stopped is not None]:
            several = "" if len(results.runs) == 1 else f"{len(stopped)} of {len(results.runs)} runs ended early: "
            typer.echo(f"clawloop: {several}{stopped[0]}", err=True)
            raise typer.Exit(1)

    return run
