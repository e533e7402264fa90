"""The sample of a session that would close without one."""

from __future__ import annotations

import math
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.ids import TurnId
from clawloop.core.samples.decision import JudgedTurn, at_least_one


def turn(number: int) -> TurnId:
    return TurnId(UUID(int=number))


def judged(number: int, expected: float | None, trainable: bool = True, sampled: bool = False) -> JudgedTurn:
    return JudgedTurn(turn(number), expected, trainable, sampled)


def test_the_turn_with_the_largest_expected_score_is_sampled_with_that_score() -> None:
    found = at_least_one([judged(1, 0.2), judged(2, -1 / 3), judged(3, 1 / 3), judged(4, None)])
    assert (found.turn_id, found.reward, found.ask) == (turn(2), -1 / 3, ())
    assert found.why == "at least one: expected score -0.33"


def test_a_session_with_a_sample_needs_no_other() -> None:
    found = at_least_one([judged(1, 0.2), judged(2, 1.0, sampled=True)])
    assert (found.turn_id, found.why) == (None, "has a sample")


def test_where_all_votes_cancel_out_a_direct_vote_is_asked_for_every_turn_that_counts() -> None:
    turns = [judged(1, 0.0), judged(2, None), judged(3, 0.0, trainable=False), judged(4, 0.0)]
    found = at_least_one(turns)
    assert (found.turn_id, found.ask) == (None, (turn(1), turn(4)))


def test_after_direct_votes_the_largest_counts_and_nothing_is_asked_again() -> None:
    assert at_least_one([judged(1, 0.02), judged(4, -0.4)], direct=True).turn_id == turn(4)
    for scores in ((0.0, 0.0), (0.02, -0.049)):
        found = at_least_one([judged(at, score) for at, score in enumerate(scores)], direct=True)
        assert (found.turn_id, found.ask) == (None, ())
        assert found.why.startswith("no sample: largest expected score is")


def test_a_score_below_the_bound_gives_no_sample() -> None:
    assert at_least_one([judged(1, 0.049)]).turn_id is None
    assert at_least_one([judged(1, 0.05)]).turn_id == turn(1)


@pytest.mark.parametrize("turns", [[], [judged(1, None)], [judged(1, 0.9, trainable=False)]])
def test_without_a_judged_turn_that_can_be_trained_there_is_a_reason(turns: list[JudgedTurn]) -> None:
    found = at_least_one(turns)
    assert (found.turn_id, found.ask, found.why) == (
        None,
        (),
        "no sample: no judged turn that can be trained",
    )


@given(st.lists(st.tuples(st.none() | st.floats(-1, 1), st.booleans(), st.booleans()), max_size=6), st.booleans())
def test_the_rule_never_gives_a_sample_without_gradient(
    turns: list[tuple[float | None, bool, bool]], direct: bool
) -> None:
    found = at_least_one([judged(at, *each) for at, each in enumerate(turns)], direct=direct)
    assert (found.turn_id is None) == (found.reward is None)
    assert found.reward is None or math.fabs(found.reward) >= 0.05
    assert not (found.turn_id and found.ask)
