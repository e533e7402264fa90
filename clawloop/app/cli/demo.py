"""`clawloop demo`: its verbs. Heavy modules are imported only when a verb runs."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.app.cli.terminal import settings_of
from clawloop.app.cli.up import Port, prepare_deployment
from clawloop.core.errors import SetupError

if TYPE_CHECKING:
    from clawloop.app.demo.practice import PracticeOptions
    from clawloop.app.demo.report import RunReport
    from clawloop.app.local.up import Prepare
    from clawloop.core.settings import Settings


# Run ------------------------------------------------------------------------------------------------------------------
# The command `clawloop demo run`. Heavy modules are imported only when it runs.

INTERRUPTED = 130  # the exit code of shells for SIGINT


def print_report(runs: Sequence[RunReport], seconds: float, *, as_json: bool, markdown: bool) -> None:
    """Print the results; the text goes to stderr if stdout is for JSON or Markdown."""
    from clawloop.app.demo import report_formats

    for line in (*report_formats.comparison_lines(runs), report_formats.summary_line(runs, seconds)):
        typer.echo(line, err=as_json or markdown)
    if as_json:
        typer.echo(report_formats.as_json(runs, seconds), nl=False)
    if markdown:
        typer.echo(report_formats.as_markdown(runs), nl=False)


def run_command(read_settings: Callable[[], Settings], load_prepare: Callable[[], Prepare]) -> Callable[..., None]:
    """Return the Typer command; see `clawloop.app.cli.up.up_command`."""

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
        model: Annotated[
            str | None,
            typer.Option(
                metavar="MODEL",
                help="A model folder, OWNER/NAME of the Hugging Face Hub, or smollm2, which is the default.",
                show_default=False,
            ),
        ] = None,
        quick: Annotated[
            bool,
            typer.Option("--quick", help="A toy instead of a pretrained model: four minutes, and it has a judge."),
        ] = False,
        methods: Annotated[
            str | None,
            typer.Option(
                help="With --quick: binary, opd, combined, hybrid; comma-separated. Default: combined.",
                show_default=False,
            ),
        ] = None,
        interactions: Annotated[
            int | None, typer.Option(help="Main turns of each run; 64 by default, 192 with --flip.")
        ] = None,
        flip: Annotated[
            str | None,
            typer.Option(
                help="With --quick: flip the user's preference half-way; code, length, tone (comma-separated), or all."
            ),
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

        from clawloop.app.demo.plan import MODEL_METHOD, TOY_METHOD, plan
        from clawloop.app.demo.recipes import demo_recipe
        from clawloop.app.demo.run import DemoOptions, DemoSetup
        from clawloop.app.demo.run import run as run_demo
        from clawloop.app.demo.scoreboard import ScoreLines, ScoreTable
        from clawloop.app.local.supervision.supervisor import open_board
        from clawloop.app.models.library import SMOLLM2, find_model

        try:
            setup = DemoSetup(
                data=(data or read_settings().data).absolute(),
                out=out.absolute(),
                environment=dict(os.environ),
                began=began or time.time(),
                port=port,
                temporal_port=temporal_port,
                temporal_ui_port=temporal_ui_port,
                engine_port=engine_port,
            )
            if environment is not None:
                given = (interactions, flip, model)
                if keep or faults or markdown or quick or any(each is not None for each in given):
                    raise SetupError(
                        "--environment: leave out --model, --quick, --interactions, --flip, --keep, --faults and"
                        " --markdown"
                    )
                from clawloop.app.demo.practice import PracticeOptions
                from clawloop.app.demo.toys import toy_of

                toy = toy_of(environment)
                chosen = plan(seeds, seed, methods, None, paced=paced, batch=1).runs
                practice = PracticeOptions(
                    toy=toy,
                    seeds=list(dict.fromkeys(each.seed for each in chosen)),
                    versions=versions or toy.versions,
                    minutes=MINUTES,
                    setup=setup,
                )
                finished = run_practice(practice, load_prepare(), as_json=as_json)
                raise typer.Exit(0 if finished else INTERRUPTED)
            if quick and model is not None:
                raise SetupError("--quick and --model: give one of them")
            learner = None if quick else model or SMOLLM2
            batch = demo_recipe(TOY_METHOD if learner is None else MODEL_METHOD).train.batch_samples
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
                    model=learner,
                ),
                setup=setup,
                keep=keep,
                faults=faults,
                model=None if learner is None else find_model(learner, setup.data / "models"),
            )
            with open_board(Console(stderr=as_json or markdown), ScoreLines, ScoreTable) as board:
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


# Environments ---------------------------------------------------------------------------------------------------------
# `clawloop demo run --environment NAME`: a toy model that learns from episodes.

MINUTES = 40.0


def run_practice(options: PracticeOptions, prepare: Prepare, *, as_json: bool) -> int:
    """Execute the runs and print their report; returns how many finished.

    Raises:
        SetupError: a part cannot start, or no sandboxes can be made.
    """
    from rich.console import Console

    from clawloop.app.demo import practice_report as reports
    from clawloop.app.demo.practice import practise
    from clawloop.app.demo.scoreboard import ScoreLines

    finished = asyncio.run(practise(options, ScoreLines(Console(stderr=as_json)), prepare))
    for run in finished:
        for line in reports.lines(run):
            typer.echo(line, err=as_json)
    if as_json and finished:
        typer.echo(reports.as_json(finished), nl=False)
    return len(finished)


# Pretrain -------------------------------------------------------------------------------------------------------------
# `clawloop demo pretrain`: makes the demo model and measures it. Heavy modules are imported only when it runs.

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from clawloop.app.demo.card import Cost
    from clawloop.app.demo.pretrain import Plan
    from clawloop.app.demo.pretrain import Progress as PretrainProgress

    Pretrain = Callable[[Path, Plan, Callable[[PretrainProgress], None]], None]


_MEASURED_TASKS = 300


def pretrain_command(
    out: Annotated[Path, typer.Option(help="Folder for the model; must be empty or new.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the lessons and the initial weights.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps; fewer give a worse model sooner.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch; all cores by default.")] = None,
    environment: Annotated[
        str | None, typer.Option(help="Instead of the chat model that of a demo: tool-call, terminal or swe.")
    ] = None,
) -> None:
    """Pretrain the demo model on synthetic data and measure it: some 12 minutes of processor time."""
    from rich.console import Console

    from clawloop.app.demo.card import write_card
    from clawloop.app.demo.evaluate import measure_answers, measure_judge, measured_lists
    from clawloop.app.demo.local_model import LocalModel
    from clawloop.app.demo.pretrain import Plan, pretrain
    from clawloop.core.judging.prompts import AnswerForm

    if out.is_dir() and any(out.iterdir()):
        raise SetupError(f"{out} is not empty: give a new folder with --out")
    console = Console()
    if environment is not None:
        _pretrain_for(environment, out, seed, steps, threads, console)
        return
    plan = Plan(seed=seed) if steps is None else Plan(seed=seed, steps=steps)
    try:
        out.mkdir(parents=True, exist_ok=True)
        cost = _pretrain_with_progress(pretrain, out, plan, threads, console)
        began = time.perf_counter()
        with console.status("measuring"):
            model = LocalModel(out)
            answers = [measure_answers(model, temperature) for temperature in (0.6, 1.0)]
            judged = {
                name: measure_judge(model, phrases, AnswerForm.GRAMMAR) for name, phrases in measured_lists().items()
            }
            handwritten = measured_lists()["our own list"]
            judged["our own list, free form"] = measure_judge(model, handwritten, AnswerForm.FREE)
        write_card(out, plan, cost, answers, judged)
    except OSError as error:
        raise SetupError(f"{out} cannot be written: {error}") from error
    for figures in answers:
        console.print(
            f"temperature {figures.temperature}: exact {figures.exact:.3f}, hint followed {figures.hint_followed:.3f}, "
            f"first style {figures.first_style}"
        )
    for name, verdicts in judged.items():
        console.print(
            f"{name}: votes {verdicts.vote:.3f}, hints {verdicts.hint:.3f}, none {verdicts.no_hint:.3f}, "
            f"unclear called bad {verdicts.unreadable_as_bad:.3f}"
        )
    measuring = time.perf_counter() - began
    console.print(
        f"{out} holds the model, made in {cost} and measured in {measuring:.0f} s; its card is README.md there."
    )


def _pretrain_for(
    environment: str, out: Path, seed: int, steps: int | None, threads: int | None, console: Console
) -> None:
    """Make and measure the model of an environment's demo: a few minutes on two idle cores."""
    import torch

    from clawloop.app.demo.toy_model import ToyModel, plan_of, pretrain_toy, write_toy_card
    from clawloop.app.demo.toys import toy_of
    from clawloop.environments.task import Split

    toy = toy_of(environment)
    plan = plan_of(toy, seed, steps)
    try:
        out.mkdir(parents=True, exist_ok=True)
        cost = _pretrain_with_progress(partial(pretrain_toy, toy), out, plan, threads, console)
        torch.manual_seed(seed)
        success = ToyModel(toy, out).success([f"{Split.TEST}-{number}" for number in range(_MEASURED_TASKS)])
        write_toy_card(toy, out, plan, cost, success, _MEASURED_TASKS)
    except OSError as error:
        raise SetupError(f"{out} cannot be written: {error}") from error
    console.print(f"success on held-out tasks {success:.2f}")
    console.print(f"{out} holds the model, made in {cost}; its card is README.md there.")


def _pretrain_with_progress(pretrain: Pretrain, out: Path, plan: Plan, threads: int | None, console: Console) -> Cost:
    """Make the model with a progress bar and return its cost."""
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from clawloop.app.demo.card import Cost

    if threads is not None:
        torch.set_num_threads(threads)
    wall_start, cpu_start = time.perf_counter(), time.process_time()
    columns = ("pretraining", BarColumn(), TextColumn("step {task.completed} of {task.total}"), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as bar:
        task = bar.add_task("pretraining", total=plan.steps, loss="")

        def show(progress: PretrainProgress) -> None:
            bar.update(task, completed=progress.step, loss=f"{progress.loss:.3f}")

        pretrain(out, plan, show)
    return Cost(time.perf_counter() - wall_start, time.process_time() - cpu_start, torch.get_num_threads())


# Report ---------------------------------------------------------------------------------------------------------------
# The command `clawloop demo report`. Heavy modules are imported only when it runs.


def report_command(
    files: Annotated[list[Path], typer.Argument(help="The demo-report.json files to join; no run may occur twice.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the joined demo-report.json and demo-report.png.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print rows as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the joined report.")] = False,
) -> None:
    """Show the reports of demos, joined into one, so that a long comparison can run in parts."""
    from clawloop.app.demo.report_formats import read_report
    from clawloop.app.demo.run import DemoResults, write_report

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


# Verbs ----------------------------------------------------------------------------------------------------------------
# `clawloop demo`: registers the demo's verbs.

demo_app = typer.Typer(no_args_is_help=True, help="A small model that learns while you watch.")


@demo_app.callback()
def demo() -> None:
    """A small model that learns while you watch."""


demo_app.command("pretrain")(pretrain_command)
demo_app.command("run")(run_command(lambda: settings_of(None), lambda: prepare_deployment))
demo_app.command("report")(report_command)
