"""How learning tells its story in the Temporal UI: Markdown of numbers and reasons, never of text.

Pure. Reasons are ours; a bar in one would break the table, so it is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from activities.training_messages import Claimed, StepDone
from clawloop.steps import StepState, TrainingState, TrainingView


def headline(
    look: TrainingView | None, computing: Claimed | None, since: datetime, publishing: bool, problems: Sequence[str]
) -> str:
    """Lines above the table: what it does now, and what holds it up."""
    lines = ["looking at the ledger"]
    if look is not None:
        lines = [_now(look, computing, since), f"v{look.version} answers, {_publishing(look, publishing)}"]
    return "\n\n".join([*lines, *problems])


def table(steps: Sequence[StepDone], active: int | None) -> str:
    """The newest steps, one line each."""
    if not steps:
        return "No step is done yet."
    lines = ["| step | samples | loss | KL | ratio | seconds | outcome | active |", "|---|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_line(step, active) for step in steps)])


def summary(look: TrainingView, claimed: Claimed) -> str:
    """One line beside the activity that computes a step."""
    return f"step {claimed.n}: {claimed.samples} samples, from v{look.head}"


def _now(look: TrainingView, computing: Claimed | None, since: datetime) -> str:
    # Whether a trainer is there to take it, only its activity tells.
    given = f"given to trainer-{look.pool} {since:%Y-%m-%d %H:%M} UTC"
    step = None if computing is None else f"{summary(look, computing)}, {given}"
    if look.state is TrainingState.PAUSED:
        return look.reason if step is None else f"{look.reason}\n\nwhat runs is finished: {step}"
    if step is not None:
        return step
    if look.step_state is StepState.CLAIMED:
        return f"step {look.step}: its batch is claimed"
    counted = f"{look.ready} of {look.needed} samples, {look.judging} turns are being judged"
    return f"waiting: {look.reason or counted}"


def _publishing(look: TrainingView, publishing: bool) -> str:
    if look.pinned is not None:
        return "pinned"
    if publishing:
        return "engines are being given the newest"
    return "the newest" if look.version == look.head else f"v{look.head} is trained"


def _line(step: StepDone, active: int | None) -> str:
    outcome = (f"{step.state}: {step.reason}" if step.reason else step.state).replace("|", "/").replace("\n", " ")
    samples = "" if step.samples is None else step.samples
    answers = "yes" if step.state is StepState.COMMITTED and step.n == active else ""
    figures = " | ".join(_figure(value) for value in (step.loss, step.kl, step.ratio))
    seconds = "" if step.seconds is None else f"{step.seconds:.1f}"
    return f"| {step.n} | {samples} | {figures} | {seconds} | {outcome} | {answers} |"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
