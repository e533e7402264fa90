import math
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import EngineAnswerUnusable
from clawloop.ids import TurnId
from clawloop.judging.hints import NOT_ASKED, HintChoice
from clawloop.judging.voting import Verdict, majority, rated
from clawloop.recipes.recipe import Signal
from clawloop.samples.assembly import Decision, JudgedTurn, Sample, assemble, at_least_one, decide

GOOD, BAD, ZERO, TIE, MISSING = (
    majority([1, 1, -1]),
    majority([-1, -1, -1]),
    majority([0, 0, 1]),
    majority([1, -1]),
    majority([None]),
)
BINARY, OPD, COMBINED = Signal(hints=False), Signal(verdicts=False, at_least_one=False), Signal()
HINT = HintChoice("Use Python.", answered=True, why="1 of 1 hint answers usable")
NO_HINT = HintChoice(None, answered=True, why="the judge found no hint")
NO_ANSWER = HintChoice(None, answered=False, why="no valid hint answer")
SAMPLED, UNDECIDED, UNJUDGED = TurnOutcome.SAMPLED, TurnOutcome.UNDECIDED, TurnOutcome.UNJUDGED


def turn(number: int) -> TurnId:
    return TurnId(UUID(int=number))


@pytest.mark.parametrize(
    ("signal", "verdict", "hint", "reward", "has_hint", "outcome"),
    [
        # Combined: both terms, one of them, or none.
        (COMBINED, GOOD, HINT, 1.0, True, SAMPLED),
        (COMBINED, BAD, HINT, -1.0, True, SAMPLED),
        (COMBINED, ZERO, HINT, None, True, SAMPLED),
        (COMBINED, MISSING, HINT, None, True, SAMPLED),
        (COMBINED, GOOD, NO_HINT, 1.0, False, SAMPLED),
        (COMBINED, BAD, NO_ANSWER, -1.0, False, SAMPLED),
        (COMBINED, ZERO, NO_HINT, None, False, UNDECIDED),
        (COMBINED, TIE, NO_ANSWER, None, False, UNDECIDED),
        (COMBINED, MISSING, NO_HINT, None, False, UNJUDGED),
        # Binary: hints do not matter.
        (BINARY, BAD, HINT, -1.0, False, SAMPLED),
        (BINARY, GOOD, NOT_ASKED, 1.0, False, SAMPLED),
        (BINARY, ZERO, HINT, None, False, UNDECIDED),
        (BINARY, MISSING, HINT, None, False, UNJUDGED),
        # OPD: verdicts do not matter.
        (OPD, GOOD, HINT, None, True, SAMPLED),
        (OPD, MISSING, HINT, None, True, SAMPLED),
        (OPD, BAD, NO_HINT, None, False, UNDECIDED),
        (OPD, BAD, NO_ANSWER, None, False, UNJUDGED),
    ],
)
def test_the_decision_table(
    signal: Signal,
    verdict: Verdict,
    hint: HintChoice,
    reward: float | None,
    has_hint: bool,
    outcome: TurnOutcome,
) -> None:
    decision = decide(signal, verdict, hint, None)
    assert (decision.reward, decision.hint, decision.outcome) == (
        reward,
        "Use Python." if has_hint else None,
        outcome,
    )


@pytest.mark.parametrize(
    ("signal", "verdict", "hint", "why"),
    [
        (COMBINED, BAD, HINT, "verdict -1: 3 of 3 votes for -1; hint: 1 of 1 hint answers usable"),
        (COMBINED, TIE, NO_HINT, "verdict 0: vote tie; no hint: the judge found no hint"),
        (BINARY, MISSING, HINT, "no valid vote"),
        (OPD, GOOD, NO_ANSWER, "no hint: no valid hint answer"),
    ],
)
def test_a_decision_says_why(signal: Signal, verdict: Verdict, hint: HintChoice, why: str) -> None:
    assert decide(signal, verdict, hint, None).why == why


def test_a_turn_that_cannot_be_trained_is_judged_and_shown_but_not_sampled() -> None:
    assert decide(BINARY, GOOD, NOT_ASKED, "not trainable: top_p") == Decision(
        None, None, TurnOutcome.NOT_TRAINABLE, "not trainable: top_p (verdict +1: 2 of 3 votes for 1)"
    )


def test_a_turn_without_a_verdict_stays_unjudged_even_if_it_could_not_be_trained() -> None:
    assert decide(BINARY, MISSING, NOT_ASKED, "not trainable: top_p").outcome is UNJUDGED


def test_a_rating_is_trained_with_its_exact_score() -> None:
    assert decide(COMBINED, rated(-0.5), NO_HINT, None).reward == -0.5
    assert decide(COMBINED, rated(0.0), NO_HINT, None).outcome is UNDECIDED


@given(
    st.sampled_from([BINARY, OPD, COMBINED]),
    st.lists(st.sampled_from([-1, 0, 1, None]), max_size=5),
    st.sampled_from([HINT, NO_HINT, NO_ANSWER]),
    st.sampled_from([None, "not trainable: top_p"]),
)
def test_sampled_means_that_there_is_a_gradient(
    signal: Signal, votes: list[int | None], hint: HintChoice, fault: str | None
) -> None:
    decision = decide(signal, majority(votes), hint, fault)  # type: ignore[arg-type]
    assert (decision.outcome is SAMPLED) == (decision.reward is not None or decision.hint is not None)
    assert decision.reward != 0
    assert decision.why


def sample(decision: Decision, **changes: object) -> Sample:
    given_: dict[str, object] = {
        "turn_id": turn(1),
        "prompt_ids": [1, 2],
        "response_ids": [3, 4],
        "logprobs": [-0.1, -0.2],
        "temperature": 0.6,
        "version": 7,
        "hinted_prompt_ids": None if decision.hint is None else [1, 9, 2],
    }
    return assemble(decision, **(given_ | changes))  # type: ignore[arg-type]


def test_a_sample_holds_the_engines_ids_and_only_the_terms_there_are() -> None:
    both = sample(decide(COMBINED, BAD, HINT, None))
    assert both == Sample(turn(1), (1, 2), (3, 4), (-0.1, -0.2), 0.6, 7, -1.0, (1, 9, 2))
    verdict_only = sample(decide(COMBINED, GOOD, NO_HINT, None))
    assert (verdict_only.reward, verdict_only.hinted_prompt_ids) == (1.0, None)
    hint_only = sample(decide(COMBINED, ZERO, HINT, None))
    assert (hint_only.reward, hint_only.hinted_prompt_ids) == (None, (1, 9, 2))


def test_a_sample_of_a_turn_that_is_not_sampled_is_refused() -> None:
    with pytest.raises(ValueError, match="is undecided, not sampled"):
        sample(decide(BINARY, ZERO, NOT_ASKED, None))


def test_hint_and_hinted_prompt_come_together() -> None:
    with pytest.raises(ValueError, match="must both be there"):
        sample(decide(COMBINED, BAD, HINT, None), hinted_prompt_ids=None)
    with pytest.raises(ValueError, match="must both be there"):
        sample(decide(COMBINED, BAD, NO_HINT, None), hinted_prompt_ids=[1])


@pytest.mark.parametrize("changes", [{"logprobs": [-0.1]}, {"prompt_ids": []}, {"response_ids": [], "logprobs": []}])
def test_ids_that_do_not_belong_together_raise(changes: dict[str, object]) -> None:
    with pytest.raises(EngineAnswerUnusable):
        sample(decide(BINARY, GOOD, NOT_ASKED, None), **changes)


def test_a_sample_without_gradient_cannot_be_made() -> None:
    good = sample(decide(BINARY, GOOD, NOT_ASKED, None))
    for reward in (None, 0.0):
        with pytest.raises(ValueError, match="a reward other than 0 or a hinted prompt"):
            replace(good, reward=reward)


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
def test_with_nothing_judged_that_can_be_trained_the_session_says_so(turns: list[JudgedTurn]) -> None:
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
