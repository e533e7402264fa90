"""Explains in words why a turn has its outcome, or what it waits for; never empty."""

from __future__ import annotations

from dataclasses import dataclass

from clawloop.core.contracts.turns import MatchedBy, TurnOutcome, TurnStatus

MEANINGS = {
    TurnOutcome.SIDE: "a side turn: recorded, never trained",
    TurnOutcome.NO_FEEDBACK: "no later message is about the reply",
    TurnOutcome.NOT_TRAINABLE: "it cannot be trained",
    TurnOutcome.UNJUDGED: "no judge gave a valid vote",
    TurnOutcome.UNDECIDED: "the verdict is 0 and there is no hint",
    TurnOutcome.SAMPLED: "its sample waits for a step",
    TurnOutcome.HELD_OUT: "never trained: versions are compared on it, or lessons are measured by it",
    TurnOutcome.TRAINED: "a step trained it",
    TurnOutcome.EXPIRED: "its sample expired",
    TurnOutcome.QUARANTINED: "left out of training: its step failed, or the version of its step was rejected",
    TurnOutcome.ROLLED_BACK: "the version that was trained on it was rolled back",
    TurnOutcome.ERASED: "its content was erased",
}
"""Meanings of the outcomes, apart from `waiting`."""


FOUND_BY = {
    MatchedBy.CONTEXT: "found by the whole conversation",
    MatchedBy.PLACE: "found by the place of its reply, which came back in other words",
    MatchedBy.REPLY: "found by its reply alone: what stood before it came back changed",
}
"""How the turn that a turn follows was found, in words."""

FORGOTTEN = "a lesson that was forgotten"
"""In place of its text."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Facts about a turn that has no decision yet.

    Args:
        notified: its session's workflow knows the turn.
        has_follow_up: a later main turn continues it, or somebody gave feedback on it.
        session_open: the session is not closed.
        in_episode: its rollout group decides about it.
    """

    notified: bool
    has_follow_up: bool
    session_open: bool
    in_episode: bool


def explain(outcome: TurnOutcome, detail: str | None, status: TurnStatus, waiting: Waiting) -> str:
    """The reason of a turn's outcome, or what it waits for."""
    if detail:
        return detail
    if outcome is not TurnOutcome.WAITING:
        return MEANINGS[outcome]
    reason = _waits_for(waiting)
    if status is TurnStatus.ABORTED:
        return f"the client went away before the reply ended; {reason}"
    if status is TurnStatus.ERROR:
        return f"the engine failed before the reply ended; {reason}"
    return reason


_LEARNED_FROM = (
    ("has a sample", "at least one reply"),
    ("the only sample of its session", "one reply"),
    ("no sample", "no reply"),
)


def learned_from(guarantee: str) -> str:
    """What the at-least-one rule did at a session's first close, in words that stand behind "learned from"."""
    for stored, words in _LEARNED_FROM:
        if guarantee.startswith(stored):
            return words + guarantee.removeprefix(stored)
    return guarantee


def _waits_for(waiting: Waiting) -> str:
    if waiting.in_episode:
        return "waits until all episodes of its rollout group have ended"
    if not waiting.notified:
        return "waits for Temporal: its session's workflow is notified within a minute, once Temporal answers"
    if waiting.has_follow_up:
        return "waits for its judge"
    if waiting.session_open:
        return "waits for a reaction: the next message of the session, a rating, or the session's end"
    return "waits for its session's workflow, which is closing the session"
