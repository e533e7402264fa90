"""How a session tells its story in the Temporal UI: Markdown of ids, counts and reasons, never of text.

Pure. Reasons are ours; a bar in one would break the table, so it is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from activities.messages import TurnFate


def table(rows: Sequence[TurnFate]) -> str:
    """The newest decided turns, one line each."""
    if not rows:
        return "No turn is decided yet."
    lines = ["| turn | kind | verdict | sample | step | why |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(_line(row) for row in rows)])


def headline(*, announced: int, judging: int, waiting: int, closing: str) -> str:
    """One line above the table: how the session is."""
    return f"{announced} main turns announced, {judging} being judged, {waiting} waiting. {closing}"


def _line(row: TurnFate) -> str:
    verdict = "" if row.verdict is None else f"{row.verdict:+d}" if row.verdict else "0"
    sample = "yes" if row.sample else "no"
    number = "?" if row.number is None else row.number
    step = "" if row.step is None else row.step
    outcome = "" if row.outcome is None else f"{row.outcome}: "
    why = f"{outcome}{row.why}".replace("|", "/").replace("\n", " ")
    return f"| {number} | {row.kind} | {verdict} | {sample} | {step} | {why} |"
