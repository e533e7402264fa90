"""What judging does with a turn."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import new_feedback_id, new_turn_id
from clawloop.core.judging.plan import Action, JudgingPlan, plan_judging
from clawloop.core.judging.records import CurrentJudgement, GivenFeedback
from tests.records import KEY

BY_STATE = CurrentJudgement(2, TurnOutcome.SAMPLED, 1, new_turn_id())
BY_FEEDBACK = CurrentJudgement(2, TurnOutcome.SAMPLED, 1, None)


def feedback(score: float | None, text: str | None = None, *, applied: bool = False) -> GivenFeedback:
    return GivenFeedback(new_feedback_id(), new_turn_id(), KEY, score, text, datetime.now(UTC), applied)


RATING, COMMENT = feedback(-1.0), feedback(None, "in Python, please")
OLD_RATING, OLD_COMMENT = feedback(-1.0, applied=True), feedback(None, "in Python, please", applied=True)
SKIP, WAIT = JudgingPlan(Action.SKIP), JudgingPlan(Action.WAIT)
OPEN, REVISE = JudgingPlan(Action.OPEN), JudgingPlan(Action.REVISE)


@pytest.mark.parametrize(
    ("has_next_state", "given", "by_outcome", "plan"),
    [
        (False, [], False, WAIT),
        (True, [], False, OPEN),
        (False, [], True, OPEN),
        (True, [], True, OPEN),
        (False, [RATING], False, REVISE),
        (True, [RATING], False, REVISE),
        (False, [COMMENT], False, REVISE),
        (True, [COMMENT], False, REVISE),
        (False, [OLD_RATING], False, OPEN),  # its judgement is not decided yet: continue it
    ],
)
def test_a_turn_without_a_decided_judgement(
    has_next_state: bool, given: list[GivenFeedback], by_outcome: bool, plan: JudgingPlan
) -> None:
    assert plan_judging(None, has_next_state=has_next_state, feedback=given, by_outcome=by_outcome) == plan


@pytest.mark.parametrize(
    ("current", "has_next_state", "given", "plan"),
    [
        # Nothing new: the message came twice.
        (BY_STATE, True, [], SKIP),
        (BY_STATE, True, [OLD_RATING, OLD_COMMENT], SKIP),
        (BY_STATE, False, [], SKIP),
        (BY_FEEDBACK, False, [OLD_RATING], SKIP),
        # A rating needs no judge, so it amends the judgement there is.
        (BY_STATE, True, [RATING], REVISE),
        (BY_STATE, True, [OLD_COMMENT, RATING], REVISE),
        (BY_STATE, True, [RATING, COMMENT], REVISE),
        (BY_STATE, True, [OLD_RATING, COMMENT], REVISE),
        # A comment, or a next state that came after the feedback, is new evidence for the judge.
        (BY_STATE, True, [COMMENT], JudgingPlan(Action.REJUDGE, 3)),
        (BY_STATE, True, [OLD_COMMENT, COMMENT], JudgingPlan(Action.REJUDGE, 3)),
        (BY_FEEDBACK, True, [OLD_RATING], JudgingPlan(Action.REJUDGE, 3)),
        (BY_FEEDBACK, True, [RATING], JudgingPlan(Action.REJUDGE, 3)),
        (BY_FEEDBACK, False, [COMMENT], JudgingPlan(Action.REJUDGE, 3)),
    ],
)
def test_a_turn_with_a_decided_judgement(
    current: CurrentJudgement, has_next_state: bool, given: list[GivenFeedback], plan: JudgingPlan
) -> None:
    assert plan_judging(current, has_next_state=has_next_state, feedback=given) == plan


@pytest.mark.parametrize(
    ("current", "requested", "given", "has_next_state", "plan"),
    [
        (None, 1, [], True, JudgingPlan(Action.REJUDGE, 1)),
        (BY_STATE, 5, [], True, JudgingPlan(Action.REJUDGE, 5)),
        (BY_STATE, 3, [RATING], True, JudgingPlan(Action.REJUDGE, 3)),
        (BY_STATE, 2, [], True, SKIP),  # done already
        (BY_STATE, 1, [], True, SKIP),
        (BY_STATE, 2, [RATING], True, REVISE),
        (BY_STATE, 3, [], False, WAIT),  # what followed the reply was erased
        (None, 1, [], False, WAIT),
    ],
)
def test_a_revision_that_an_operator_asked_for(
    current: CurrentJudgement | None,
    requested: int,
    given: list[GivenFeedback],
    has_next_state: bool,
    plan: JudgingPlan,
) -> None:
    plan_ = plan_judging(current, has_next_state=has_next_state, feedback=given, requested_revision=requested)
    assert plan_ == plan


@pytest.mark.parametrize("current", [None, BY_STATE, BY_FEEDBACK])
def test_an_erased_turn_is_never_judged(current: CurrentJudgement | None) -> None:
    plan = plan_judging(current, has_next_state=True, feedback=[COMMENT], requested_revision=7, erased=True)
    assert plan == SKIP
