"""Markdown that the Temporal UI shows of sessions and training: ids, counts and reasons, no text of a conversation.

Pure. A bar in a reason would break the table, so it is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from activities.training.train_step import StepDone
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.training import Claim, StepState, TrainingState, TrainingView
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.judging.voting import signed

# The UI draws tables without space between columns; Markdown keeps non-breaking spaces.
_GAP = "\u00a0" * 3
_COLUMNS = ("turn", "kind", "verdict", "sample", "step", "why")


def session_table(rows: Sequence[TurnResult]) -> str:
    """A table of the newest decided turns."""
    if not rows:
        return "No turn is decided yet."
    return "\n".join([_row(_COLUMNS), "|:---" * len(_COLUMNS) + "|", *(_row(_session_cells(row)) for row in rows)])


def session_headline(*, turns: int, judging: int, waiting: int, closing: str) -> str:
    """The line above the table: counts, and when the session closes."""
    received = "1 main turn" if turns == 1 else f"{turns} main turns"
    return f"{received} received, {judging} being judged, {waiting} waiting. {closing}"


def erased_row(row: TurnResult) -> TurnResult:
    """The row after its turn's content was erased; the step that trained the turn stays."""
    erased = {
        "outcome": TurnOutcome.ERASED,
        "verdict": None,
        "sample": row.step is not None,
        "why": TurnOutcome.ERASED.value,
    }
    return row.model_copy(update=erased)


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
    # Some reasons begin with the outcome already.
    why = row.why if not outcome or row.why.startswith(outcome) else f"{outcome}: {row.why}"
    return why.replace("|", "/").replace("\n", " ")


def _row(cells: Sequence[str]) -> str:
    return "".join(f"|{cell}{_GAP}" for cell in cells) + "|"


def training_headline(
    view: TrainingView | None, computing: Claim | None, since: datetime, publishing: bool, notes: Sequence[str]
) -> str:
    """The lines above the table: what training does now, which version answers, and the notes."""
    lines = ["reading the ledger"]
    if view is not None:
        lines = [_current_work(view, computing, since), f"v{view.version} answers, {_publishing(view, publishing)}"]
    return "\n\n".join([*lines, *notes])


def training_table(steps: Sequence[StepDone], active: int | None) -> str:
    """A table of the newest steps."""
    if not steps:
        return "No step is done yet."
    lines = [
        "| step | samples | loss | KL | ratio | seconds | gate | outcome | active |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_step_row(step, active) for step in steps)])


def step_summary(view: TrainingView, claimed: Claim) -> str:
    """The summary of the activity that computes a step."""
    return f"step {claimed.n}: {claimed.samples} samples, from v{view.head}"


def _current_work(view: TrainingView, computing: Claim | None, since: datetime) -> str:
    # Only the Temporal activity itself shows whether a trainer has taken it.
    assigned = f"queued for trainer-{view.pool} at {since:%Y-%m-%d %H:%M} UTC"
    step = None if computing is None else f"{step_summary(view, computing)}, {assigned}"
    if view.state is TrainingState.PAUSED:
        return view.reason if step is None else f"{view.reason}\n\nstill computing: {step}"
    if step is not None:
        return step
    if view.step_state is StepState.CLAIMED:
        return f"step {view.step}: its batch is claimed"
    if view.step_state is StepState.CANDIDATE:
        return f"step {view.step}: its version is at the gate"
    counts = f"{view.ready} of {view.needed} samples, {view.judging} turns are being judged"
    return f"waiting: {view.reason or counts}"


def _publishing(view: TrainingView, publishing: bool) -> str:
    if view.pinned is not None:
        return "pinned"
    if publishing:
        return "engines are loading the newest"
    return "the newest" if view.version == view.head else f"v{view.head} is trained"


def _step_row(step: StepDone, active: int | None) -> str:
    # The reason of a rejected step begins with its state.
    outcome = step.reason if step.reason.startswith(step.state) else f"{step.state}: {step.reason}".removesuffix(": ")
    outcome = outcome.replace("|", "/").replace("\n", " ")
    samples = "" if step.samples is None else step.samples
    answers = "yes" if step.state is StepState.COMMITTED and step.n == active else ""
    figures = " | ".join(_figure(value) for value in (step.loss, step.kl, step.ratio))
    seconds = "" if step.seconds is None else f"{step.seconds:.1f}"
    return f"| {step.n} | {samples} | {figures} | {seconds} | {step.gate} | {outcome} | {answers} |"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
