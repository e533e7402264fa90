import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.errors import EngineAnswerUnusable
from clawloop.core.judging.voting import Verdict, Vote, choice_logprobs, direct_vote, majority, rated

any_vote: st.SearchStrategy[Vote | None] = st.sampled_from([-1, 0, 1, None])


@pytest.mark.parametrize(
    ("votes", "verdict"),
    [
        ([1, 1, -1], Verdict(1, 1 / 3, 1.0, "2 of 3 votes for 1")),
        ([-1, -1, -1], Verdict(-1, -1.0, -1.0, "3 of 3 votes for -1")),
        ([0, 0, 1], Verdict(0, 1 / 3, 0.0, "2 of 3 votes for 0")),
        ([1, -1], Verdict(0, 0.0, 0.0, "vote tie")),
        ([1, 0, -1], Verdict(0, 0.0, 0.0, "vote tie")),
        ([1, 1, 0, 0, -1], Verdict(0, 0.2, 0.0, "vote tie")),
        ([1, None, None], Verdict(1, 1.0, 1.0, "1 of 1 votes for 1, 2 missing")),
        ([1, None, -1], Verdict(0, 0.0, 0.0, "vote tie, 1 missing")),
        ([None, None], Verdict(None, None, None, "no valid vote")),
        ([], Verdict(None, None, None, "no valid vote")),
    ],
)
def test_the_verdict_is_the_most_frequent_valid_vote(votes: list[Vote | None], verdict: Verdict) -> None:
    assert majority(votes) == verdict


@given(st.lists(any_vote, max_size=9))
def test_missing_votes_and_their_order_change_nothing_but_the_reason(votes: list[Vote | None]) -> None:
    full, valid = majority(votes), majority([vote for vote in reversed(votes) if vote is not None])
    assert (full.verdict, full.expected, full.reward) == (valid.verdict, valid.expected, valid.reward)
    assert (full.verdict is None) == all(vote is None for vote in votes)


@given(st.lists(any_vote, max_size=9))
def test_inverting_every_vote_inverts_the_verdict(votes: list[Vote | None]) -> None:
    turned: list[Vote | None] = [None if vote is None else {-1: 1, 0: 0, 1: -1}[vote] for vote in votes]  # type: ignore[misc]
    plain, mirrored = majority(votes), majority(turned)
    assert plain.verdict == (None if mirrored.verdict is None else -mirrored.verdict)
    assert plain.expected == (None if mirrored.expected is None else -mirrored.expected)


def test_a_direct_vote_is_the_likeliest_choice_and_its_expected_score() -> None:
    verdict = direct_vote({1: math.log(0.7), 0: math.log(0.1), -1: math.log(0.2)})
    assert verdict.verdict == 1
    assert verdict.expected == pytest.approx(0.5)
    assert verdict.why == "direct vote +0.50"


def test_a_direct_vote_is_the_same_before_and_after_the_grammar_masked_other_tokens() -> None:
    masked = direct_vote({1: math.log(0.6), 0: math.log(0.1), -1: math.log(0.3)})
    raw = direct_vote({1: math.log(0.06), 0: math.log(0.01), -1: math.log(0.03)})
    assert raw.expected == pytest.approx(masked.expected)


def test_a_direct_vote_that_is_even_is_zero() -> None:
    half = math.log(0.5)
    assert direct_vote({1: half, -1: half, 0: -math.inf}) == Verdict(0, 0.0, 0.0, "direct vote +0.00")


def test_a_direct_vote_needs_three_log_probs() -> None:
    for bad in (
        {1: -0.1},
        {1: math.nan, 0: -1.0, -1: -1.0},
        {1: 2.0, 0: -1.0, -1: -1.0},
        dict.fromkeys((1, 0, -1), -math.inf),
    ):
        with pytest.raises(EngineAnswerUnusable):
            direct_vote(bad)  # type: ignore[arg-type]


def test_the_first_token_identifies_the_choice_however_minus_one_is_split() -> None:
    assert choice_logprobs({"1": -1.0, "0": -2.0, "-": -3.0, "x": -9.0}) == {1: -1.0, 0: -2.0, -1: -3.0}
    both = choice_logprobs({"1": -1.0, "0": -2.0, "-": math.log(0.1), "-1": math.log(0.2)})
    assert both is not None
    assert both[-1] == pytest.approx(math.log(0.3))


def test_a_choice_the_engine_did_not_report_makes_no_distribution() -> None:
    assert choice_logprobs({"1": -0.1, "0": -2.0}) is None


@pytest.mark.parametrize(("score", "verdict"), [(1.0, 1), (-1.0, -1), (0.3, 1), (-0.01, -1), (0.0, 0)])
def test_a_rating_is_the_verdict_and_its_exact_score_the_reward(score: float, verdict: Vote) -> None:
    assert rated(score) == Verdict(verdict, score, score, f"rated {score:+.2f} by the user")


@pytest.mark.parametrize("score", [1.5, -2.0, math.nan])
def test_a_rating_outside_its_range_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match="a score must be in"):
        rated(score)
