"""May a turn be judged once more because an operator says so? Pure.

Knows nothing about how it is judged. What a step has used stays as it was when it was used: only explicit feedback
makes a further sample then.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawloop.contracts.sessions import SessionFacts
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import TurnId

_FINAL = {
    TurnOutcome.NO_FEEDBACK: "nothing later speaks about it, so there is nothing to judge it by",
    TurnOutcome.ERASED: "it was erased",
}


@dataclass(frozen=True, slots=True)
class RejudgeFacts:
    """What is known of a turn that somebody wants judged again.

    Args:
        session: its own, as its workflow is begun with.
        replied: it has a reply to judge.
        answered: a main turn continues it, or somebody has given feedback on it: there may be something to judge it by.
        sample: the state of the sample a step has or had, else of its newest one; None if it has none.
        next_revision: of the judgement that would come after the newest decided one, from 0.
    """

    turn_id: TurnId
    session: SessionFacts
    kind: TurnKind
    outcome: TurnOutcome
    replied: bool
    sample: SampleState | None
    next_revision: int
    answered: bool = True


def why_not_rejudged(turn: RejudgeFacts) -> str | None:
    """Why this turn cannot be judged again, for people; None if it can."""
    if turn.kind is TurnKind.SIDE:
        return "it is a side turn: those are never judged"
    if (why := _FINAL.get(turn.outcome)) is not None:
        return why
    if not turn.replied:
        return "it has no reply to judge"
    if not turn.answered:
        return "nothing has followed it yet, and nobody has given feedback on it"
    if turn.sample is SampleState.CLAIMED:
        return "a training step is using its sample now"
    # One that expired taught nothing: e.g. the recipe was changed while it waited.
    if turn.sample not in (None, SampleState.FRESH, SampleState.SUPERSEDED, SampleState.EXPIRED):
        return f"its sample is {turn.sample} already: give feedback on it instead"
    return None
