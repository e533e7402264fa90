"""Conditions under which an operator may have a turn judged again.

A sample that a step has used stays as it was: then only explicit feedback makes a further sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawloop.contracts.sessions import SessionFacts
from clawloop.contracts.training import UNTAKEN, SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import TurnId

_FINAL = {
    TurnOutcome.NO_FEEDBACK: "no later message is about it, so there is nothing to judge it by",
    TurnOutcome.ERASED: "it was erased",
}


@dataclass(frozen=True, slots=True)
class RejudgeFacts:
    """The facts that decide whether a turn may be judged again.

    Args:
        session: what the session's workflow is started with.
        replied: the turn has a reply to judge.
        sample: the state of the sample that a step has or had, else of the newest one; None without a sample.
        next_revision: the revision after the newest decided judgement, from 0.
        has_follow_up: a main turn continues it, or it has feedback: there may be something to judge it by.
    """

    turn_id: TurnId
    session: SessionFacts
    kind: TurnKind
    outcome: TurnOutcome
    replied: bool
    sample: SampleState | None
    next_revision: int
    has_follow_up: bool = True


def why_not_rejudged(turn: RejudgeFacts) -> str | None:
    """The reason, for people, that a turn cannot be judged again; None if it can."""
    if turn.kind is TurnKind.SIDE:
        return "it is a side turn: those are never judged"
    if (why := _FINAL.get(turn.outcome)) is not None:
        return why
    if not turn.replied:
        return "it has no reply to judge"
    if not turn.has_follow_up:
        return "no message has followed it yet, and it has no feedback"
    if turn.sample is SampleState.CLAIMED:
        return "a training step is using its sample now"
    # An expired sample was never used: e.g. the recipe was changed while it waited.
    if turn.sample not in (None, *UNTAKEN, SampleState.EXPIRED):
        return f"its sample is {turn.sample} already: give feedback on it instead"
    return None
