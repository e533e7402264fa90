"""How a session tells its story in the Temporal UI: Markdown of ids, counts and reasons, never of text.

Pure. Reasons are ours; a bar in one would break the table, so it is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from activities.messages import TurnResult
from clawloop.contracts import TurnOutcome
from clawloop.judging.voting import signed

# The UI draws tables without any space between columns; Markdown keeps spaces that do not break.
_GAP = "\u00a0" * 3
_COLUMNS = ("turn", "kind", "verdict", "sample", "step", "why")


def table(rows: Sequence[TurnResult]) -> str:
    """The newest decided turns, one line each."""
    if not rows:
        return "No turn is decided yet."
    return "\n".join([_line(_COLUMNS), "|:---" * len(_COLUMNS) + "|", *(_line(_cells(row)) for row in rows)])


def headline(*, announced: int, judging: int, waiting: int, closing: str) -> str:
    """One line above the table: how the session is."""
    turns = "1 main turn" if announced == 1 else f"{announced} main turns"
    return f"{turns} announced, {judging} being judged, {waiting} waiting. {closing}"


def erased(row: TurnResult) -> TurnResult:
    """The row of a turn whose content was erased: what steps learned from it stays."""
    gone = {
        "outcome": TurnOutcome.ERASED,
        "verdict": None,
        "sample": row.step is not None,
        "why": TurnOutcome.ERASED.value,
    }
    return row.model_copy(update=gone)


def _cells(row: TurnResult) -> tuple[str, ...]:
    return (
        "?" if row.number is None else str(row.number),
        row.kind,
        "" if row.verdict is None else signed(row.verdict),
        "yes" if row.sample else "no",
        "" if row.step is None else str(row.step),
        _why(row),
    )


def _why(row: TurnResult) -> str:
    outcome = "" if row.outcome is None else row.outcome.replace("_", " ")
    # Some reasons begin with the outcome's own words.
    whole = row.why if not outcome or row.why.startswith(outcome) else f"{outcome}: {row.why}"
    return whole.replace("|", "/").replace("\n", " ")


def _line(cells: Sequence[str]) -> str:
    return "".join(f"|{cell}{_GAP}" for cell in cells) + "|"
