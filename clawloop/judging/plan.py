"""The plan of a turn's judgement: one decision, from stored data and the request to judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from clawloop.judging.records import CurrentJudgement, GivenFeedback


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
) -> JudgingPlan:
    """The one thing to do with a turn.

    Args:
        current: the turn's newest decided judgement; None if there is none.
        has_next_state: a later request holds what followed the turn's reply.
        feedback: all feedback on the turn.
        requested_revision: the judgement an operator asked for; None if no operator did.
        by_outcome: its session's outcome is enough to judge the turn by.
        erased: the turn's content was erased.
    """
    has_new_feedback = any(not given.applied for given in feedback)
    is_new_state = has_next_state and current is not None and current.next_turn_id is None
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
