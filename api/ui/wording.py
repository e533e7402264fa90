"""The page's wording of times, figures and states."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnOutcome
from clawloop.turns.explain import FOUND_BY

_UNITS = ((86400 * 7, "week"), (86400, "day"), (3600, "hour"), (60, "minute"))
_VERDICTS = {1: "praised", 0: "neutral", -1: "blamed"}
OUTCOMES = {
    TurnOutcome.WAITING: "waits for what comes next",
    TurnOutcome.SIDE: "side turn",
    TurnOutcome.NO_FEEDBACK: "nothing followed",
    TurnOutcome.NOT_TRAINABLE: "cannot be trained",
    TurnOutcome.UNJUDGED: "no valid vote",
    TurnOutcome.UNDECIDED: "undecided",
    TurnOutcome.SAMPLED: "waits for a step",
    TurnOutcome.HELD_OUT: "held out",
    TurnOutcome.TRAINED: "trained",
    TurnOutcome.EXPIRED: "expired",
    TurnOutcome.QUARANTINED: "quarantined",
    TurnOutcome.ROLLED_BACK: "rolled back",
    TurnOutcome.ERASED: "erased",
}


def age(at: datetime | None) -> str:
    """The age of a moment, e.g. `3 minutes ago`."""
    if at is None:
        return "never"
    seconds = (datetime.now(UTC) - at).total_seconds()
    for size, name in _UNITS:
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return "just now" if seconds < 5 else f"{int(seconds)} seconds ago"


def duration(seconds: float) -> str:
    """E.g. `1 min 20 s`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def moment(at: datetime) -> str:
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def verdict(value: int | None) -> str:
    return "no verdict" if value is None else _VERDICTS.get(value, str(value))


def tone(value: int | None) -> str:
    """A class of the style sheet."""
    return {1: "good", -1: "bad", 0: "neutral"}.get(value, "none") if value is not None else "none"


def figure(value: Any) -> str:
    """A number with three digits that count, or a dash."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def outcome(value: TurnOutcome) -> str:
    return OUTCOMES[value]


def why(value: str, shown: TurnOutcome) -> str:
    """The reason for a turn's outcome, without the words of the outcome, which stand beside it."""
    return value.removeprefix(OUTCOMES[shown]).removeprefix(": ")


def pieces(words: str) -> list[str]:
    """The parts of a text between its backticks: every other one is code. Of odd backticks none is one."""
    parts = words.split("`")
    return parts if len(parts) % 2 else [words]


def sample(value: SampleState) -> str:
    return "waits for a step" if value is SampleState.FRESH else value.value.replace("_", " ")


def share(value: float) -> str:
    return f"{value:.0%}"


def sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}."


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


FILTERS: dict[str, Callable[..., Any]] = {
    "age": age,
    "duration": duration,
    "moment": moment,
    "verdict": verdict,
    "tone": tone,
    "found_by": FOUND_BY.__getitem__,
    "figure": figure,
    "outcome": outcome,
    "sample": sample,
    "share": share,
    "plural": plural,
    "sentence": sentence,
    "why": why,
    "pieces": pieces,
}
