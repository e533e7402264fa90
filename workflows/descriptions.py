"""Descriptions that the Temporal UI shows of a session and of training: Markdown of ids, counts and reasons.

Pure. Never the text of a conversation. A bar in a reason would break the table, so it is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from activities.training.messages import StepDone
from clawloop.contracts.sessions import TurnResult
from clawloop.contracts.training import Claim, StepState, TrainingState, TrainingView
from clawloop.contracts.turns import TurnOutcome
from clawloop.judging.voting import signed

# The UI draws tables without any space between columns; Markdown keeps spaces that do not break.
_GAP = "\u00a0" * 3
_COLUMNS = ("turn", "kind", "verdict", "sample", "step", "why")


def session_table(rows: Sequence[TurnResult]) -> str:
    """The newest decided turns, one line each."""
    if not rows:
        return "No turn is decided yet."
    return "\n".join([_row(_COLUMNS), "|:---" * len(_COLUMNS) + "|", *(_row(_session_cells(row)) for row in rows)])


def session_headline(*, announced: int, judging: int, waiting: int, closing: str) -> str:
    """One line above the table: how the session is."""
    turns = "1 main turn" if announced == 1 else f"{announced} main turns"
    return f"{turns} announced, {judging} being judged, {waiting} waiting. {closing}"


def erased_row(row: TurnResult) -> TurnResult:
    """The row of a turn whose content was erased: what steps learned from it stays."""
    gone = {
        "outcome": TurnOutcome.ERASED,
        "verdict": None,
        "sample": row.step is not None,
        "why": TurnOutcome.ERASED.value,
    }
    return row.model_copy(update=gone)


def _session_cells(row: TurnResult) -> tuple[str, ...]:
    return (
        "?" if row.number is None else str(row.number),
        row.kind,
        "" if row.verdict is None else signed(row.verdict),
        "yes" if row.sample else "no",
        "" if row.step is None else str(row.step),
        _session_why(row),
    )


def _session_why(row: TurnResult) -> str:
    outcome = "" if row.outcome is None else row.outcome.replace("_", " ")
    # Some reasons begin with the outcome's own words.
    whole = row.why if not outcome or row.why.startswith(outcome) else f"{outcome}: {row.why}"
    return whole.replace("|", "/").replace("\n", " ")


def _row(cells: Sequence[str]) -> str:
    return "".join(f"|{cell}{_GAP}" for cell in cells) + "|"


def training_headline(
    look: TrainingView | None, computing: Claim | None, since: datetime, publishing: bool, problems: Sequence[str]
) -> str:
    """Lines above the table: what it does now, and what holds it up."""
    lines = ["looking at the ledger"]
    if look is not None:
        lines = [_now(look, computing, since), f"v{look.version} answers, {_publishing(look, publishing)}"]
    return "\n\n".join([*lines, *problems])


def training_table(steps: Sequence[StepDone], active: int | None) -> str:
    """The newest steps, one line each."""
    if not steps:
        return "No step is done yet."
    lines = ["| step | samples | loss | KL | ratio | seconds | outcome | active |", "|---|---|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_step_row(step, active) for step in steps)])


def step_summary(look: TrainingView, claimed: Claim) -> str:
    """One line beside the activity that computes a step."""
    return f"step {claimed.n}: {claimed.samples} samples, from v{look.head}"


def _now(look: TrainingView, computing: Claim | None, since: datetime) -> str:
    # Whether a trainer is there to take it, only its activity tells.
    given = f"given to trainer-{look.pool} {since:%Y-%m-%d %H:%M} UTC"
    step = None if computing is None else f"{step_summary(look, computing)}, {given}"
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


def _step_row(step: StepDone, active: int | None) -> str:
    outcome = (f"{step.state}: {step.reason}" if step.reason else step.state).replace("|", "/").replace("\n", " ")
    samples = "" if step.samples is None else step.samples
    answers = "yes" if step.state is StepState.COMMITTED and step.n == active else ""
    figures = " | ".join(_figure(value) for value in (step.loss, step.kl, step.ratio))
    seconds = "" if step.seconds is None else f"{step.seconds:.1f}"
    return f"| {step.n} | {samples} | {figures} | {seconds} | {outcome} | {answers} |"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
