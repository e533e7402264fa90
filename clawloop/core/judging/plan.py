"""Plans the judging of a turn, also where an operator asks for it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from clawloop.core.contracts.sessions import SessionFacts
from clawloop.core.contracts.training import UNTAKEN, SampleState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.ids import TurnId
from clawloop.core.judging.records import CurrentJudgement, GivenFeedback

# Plans ----------------------------------------------------------------------------------------------------------------
# The plan of a turn's judgement: one decision, from stored data and the request to judge.


class Action(StrEnum):
    SKIP = "skip"  # report the turn as it is stored: the message came twice, or this attempt is a retry
    WAIT = "wait"  # there is nothing to judge the turn by yet: report nothing
    OPEN = "open"  # make the turn's first judgement, or continue it
    REVISE = "revise"  # amend the newest judgement by new feedback; its votes stay
    REJUDGE = "rejudge"  # make a further judgement of the plan's revision, or continue it: new votes


@dataclass(frozen=True, slots=True)
class JudgingPlan:
    """
    Args:
        revision: of the judgement that OPEN and REJUDGE make.
    """

    action: Action
    revision: int = 0


def plan_judging(
    current: CurrentJudgement | None,
    *,
    has_next_state: bool,
    feedback: Sequence[GivenFeedback],
    requested_revision: int | None = None,
    by_outcome: bool = False,
    erased: bool = False,
    said_behind_tools: TurnId | None = None,
) -> JudgingPlan:
    """The one thing to do with a turn.

    Args:
        current: the turn's newest decided judgement; None if there is none.
        has_next_state: a later request holds what followed the turn's reply.
        feedback: all feedback on the turn.
        requested_revision: the judgement an operator asked for; None if no operator did.
        by_outcome: its session's outcome is enough to judge the turn by.
        erased: the turn's content was erased.
        said_behind_tools: the turn whose request holds the next state, if that is `NextState.behind_tools`.
    """
    has_new_feedback = any(not given.applied for given in feedback)
    is_new_state = (
        has_next_state
        and current is not None
        and (current.next_turn_id is None or said_behind_tools not in (None, current.next_turn_id))
    )
    if erased:
        return JudgingPlan(Action.SKIP)
    if current is not None and current.revision >= (requested_revision or 0) and not (has_new_feedback or is_new_state):
        return JudgingPlan(Action.SKIP)
    if not (has_next_state or feedback or by_outcome):
        return JudgingPlan(Action.WAIT)
    if requested_revision is not None and (current is None or requested_revision > current.revision):
        return JudgingPlan(Action.REJUDGE, requested_revision)
    is_text_only = has_new_feedback and all(given.score is None for given in feedback)
    if current is not None and (is_text_only or is_new_state):
        # There is more evidence than before, so the votes given without it no longer count.
        return JudgingPlan(Action.REJUDGE, current.revision + 1)
    return JudgingPlan(Action.REVISE if has_new_feedback else Action.OPEN)


# Judging again --------------------------------------------------------------------------------------------------------
# Conditions under which an operator may have a turn judged again.
#
# A sample that a step has used stays as it was: then only explicit feedback makes a further sample.

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
    if turn.kind is not TurnKind.MAIN:
        return f"it is a {turn.kind.value} turn: those are never judged"
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
