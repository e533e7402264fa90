"""`clawloop demo pretrain`: makes the demo model and measures it. Heavy modules are imported only when it runs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clawloop.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from clawloop.demo.card import Cost
    from clawloop.demo.pretrain import Plan
    from clawloop.demo.pretrain import Progress as PretrainProgress

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
    """Pretrain the demo model on synthetic data and measure it: under 10 minutes on two idle cores."""
    from rich.console import Console

    from clawloop.demo.card import write_card
    from clawloop.demo.evaluate import DemoModel, measure_answers, measure_judge, measured_lists
    from clawloop.demo.pretrain import Plan, pretrain
    from clawloop.judging.prompts import AnswerForm

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
            model = DemoModel(out)
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

    from clawloop.demo.practice.card import write_card
    from clawloop.demo.practice.pretrain import plan_of, pretrain_toy
    from clawloop.demo.practice.toy_model import ToyModel
    from clawloop.demo.practice.toys import toy_of
    from clawloop.environments.task import Split

    toy = toy_of(environment)
    plan = plan_of(toy.course, seed, steps)
    try:
        out.mkdir(parents=True, exist_ok=True)
        cost = _pretrain_with_progress(partial(pretrain_toy, toy), out, plan, threads, console)
        torch.manual_seed(seed)
        success = ToyModel(toy, out).success([f"{Split.TEST}-{number}" for number in range(_MEASURED_TASKS)])
        write_card(toy, out, plan, cost, success, _MEASURED_TASKS)
    except OSError as error:
        raise SetupError(f"{out} cannot be written: {error}") from error
    console.print(f"success on held-out tasks {success:.2f}")
    console.print(f"{out} holds the model, made in {cost}; its card is README.md there.")


def _pretrain_with_progress(pretrain: Pretrain, out: Path, plan: Plan, threads: int | None, console: Console) -> Cost:
    """Make the model with a progress bar and return its cost."""
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from clawloop.demo.card import Cost

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
