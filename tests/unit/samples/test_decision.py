"""The outcome of a judged turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.judging.hints import NOT_ASKED, HintChoice
from clawloop.core.judging.records import TurnDecision
from clawloop.core.judging.voting import Verdict, majority, rated
from clawloop.core.recipes.recipe import Signal
from clawloop.core.samples.decision import decide

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
def test_a_decision_has_a_reason(signal: Signal, verdict: Verdict, hint: HintChoice, why: str) -> None:
    assert decide(signal, verdict, hint, None).why == why


def test_a_turn_that_cannot_be_trained_is_judged_and_shown_but_not_sampled() -> None:
    assert decide(BINARY, GOOD, NOT_ASKED, "not trainable: top_p") == TurnDecision(
        TurnOutcome.NOT_TRAINABLE, "not trainable: top_p (verdict +1: 2 of 3 votes for 1)"
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
