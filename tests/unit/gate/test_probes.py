"""The check by probes: evidence rejects, a difference within chance does not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.contracts.training import CheckResult, GateCheck, ProbeAnswer, ProbeContent
from clawloop.core.gate.checks import (
    ProbePair,
    ProbeScores,
    check_probes,
    has_valid_calls,
    is_broken,
    is_right,
    not_asked,
    pattern_problem,
    repeated_share,
    sign_test,
)

CHECKED = ProbeContent(messages=[{"role": "user", "content": "2 + 2?"}], contains=["4"])
OPEN = ProbeContent(messages=[{"role": "user", "content": "Hello"}])
TOOLS = ProbeContent(messages=OPEN.messages, tools=[{"type": "function", "function": {"name": "look"}}])
FINE = ProbeAnswer("It is 4.")


def checks_of(pairs: Sequence[ProbePair], content_loss: float = 1.0) -> GateCheck:
    return check_probes([ProbeScores.of(pair) for pair in pairs], content_loss)


def checked(parent: bool, version: bool) -> ProbePair:
    return ProbePair(CHECKED, FINE, FINE, parent, version)


def compared(preferred: int) -> ProbePair:
    return ProbePair(OPEN, FINE, FINE, preferred=preferred)


def test_a_version_that_forgot_what_its_parent_knew_fails() -> None:
    check = checks_of([checked(parent=True, version=False)] * 7)
    assert check.result is CheckResult.FAILED
    assert check.reason == "wrong content: 7 of 7 probes on which the version and its parent differ (p = 0.0078)"
    assert (check.figures["right"], check.figures["parent_right"]) == (0.0, 1.0)


def test_small_losses_of_many_versions_add_up_beside_the_base_model() -> None:
    kept = [ProbePair(CHECKED, FINE, FINE, True, True, right_base=True)] * 50
    lost_before = ProbePair(CHECKED, FINE, FINE, False, False, right_base=True)
    lost_now = ProbePair(CHECKED, FINE, FINE, True, False, right_base=True)
    check = checks_of([*kept, *[lost_before] * 4, *[lost_now] * 2])
    assert check.result is CheckResult.FAILED
    assert check.reason == ("wrong content: 6 of 6 probes on which the version and the base model differ (p = 0.016)")
    assert check.figures["parent_right"] == pytest.approx(52 / 56)
    assert check.figures["base_right"] == 1.0
    assert checks_of([*kept, *[lost_before] * 4, lost_now]).result is CheckResult.PASSED
    won_back = ProbePair(CHECKED, FINE, FINE, False, True, right_base=True)
    assert checks_of([*kept, *[lost_before] * 7, *[won_back] * 3]).result is CheckResult.PASSED
    gained = ProbePair(CHECKED, FINE, FINE, True, True, right_base=False)
    assert checks_of([*kept, *[lost_before] * 4, *[lost_now] * 2, *[gained] * 4]).result is CheckResult.PASSED


KEPT = ProbePair(CHECKED, FINE, FINE, True, True, right_base=True)
LOST = ProbePair(CHECKED, FINE, FINE, True, False, right_base=True)
LOST_BEFORE = ProbePair(CHECKED, FINE, FINE, False, False, right_base=True)


def test_a_loss_too_small_for_a_test_is_bounded_by_the_recipe() -> None:
    two = [*[KEPT] * 98, *[LOST] * 2]
    assert checks_of(two).result is CheckResult.PASSED
    assert checks_of(two, content_loss=0.02).result is CheckResult.PASSED
    check = checks_of(two, content_loss=0.01)
    assert check.result is CheckResult.FAILED
    assert check.reason == ("lost content: 2 of 100 probes beside the base model, limit 0.01 (gate.content_loss)")
    first = [ProbePair(CHECKED, FINE, FINE, True, right) for right in (True, False)]  # the parent is the base model
    assert checks_of([*[first[0]] * 98, *[first[1]] * 2], content_loss=0.01).result is CheckResult.FAILED


def test_what_the_base_model_did_not_know_makes_up_for_what_is_lost() -> None:
    gained = ProbePair(CHECKED, FINE, FINE, False, True, right_base=False)
    assert checks_of([*[KEPT] * 94, *[LOST] * 4, *[gained] * 2], content_loss=0.01).result is CheckResult.FAILED
    assert checks_of([*[KEPT] * 94, *[LOST] * 3, *[gained] * 2], content_loss=0.01).result is CheckResult.PASSED


def test_one_probe_alone_bounds_nothing() -> None:
    assert checks_of([*[KEPT] * 97, *[LOST] * 2], content_loss=0.01).result is CheckResult.PASSED


def test_a_parent_that_lost_more_than_is_allowed_does_not_keep_out_who_loses_nothing_more() -> None:
    released = [*[KEPT] * 95, *[LOST_BEFORE] * 5]
    assert checks_of(released, content_loss=0.01).result is CheckResult.PASSED
    assert checks_of([*released[1:], LOST], content_loss=0.01).result is CheckResult.FAILED


def test_what_neither_knew_and_a_few_that_differ_are_no_evidence() -> None:
    both_wrong = [checked(parent=False, version=False)] * 20
    assert checks_of(both_wrong).result is CheckResult.PASSED
    assert checks_of([*both_wrong, *[checked(parent=True, version=False)] * 3]).result is CheckResult.PASSED
    mixed = [checked(parent=True, version=False)] * 8 + [checked(parent=False, version=True)] * 7
    assert checks_of(mixed).result is CheckResult.PASSED


def test_the_judge_decides_from_ten_pairs_on_and_ties_count_for_nobody() -> None:
    nine, ten = checks_of([compared(-1)] * 9), checks_of([compared(-1)] * 10)
    assert (nine.result, ten.result) == (CheckResult.NOT_ENOUGH, CheckResult.FAILED)
    assert nine.reason.endswith("too few to reject by: 10 compared or 5 with checked content are needed")
    assert ten.reason.startswith("answers the judge likes less: 10 of 10")
    assert checks_of([compared(0)] * 20 + [compared(-1)] * 4).result is CheckResult.PASSED
    assert checks_of([compared(1)] * 12).result is CheckResult.PASSED


def test_loops_empty_answers_and_invalid_tool_calls_are_evidence_and_length_is_none() -> None:
    loop = ProbeAnswer("the same words again and " * 20)
    assert checks_of([ProbePair(OPEN, FINE, loop)] * 8).reason.startswith("looping or empty answers: 8 of 8")
    assert checks_of([ProbePair(OPEN, FINE, ProbeAnswer(" "))] * 8).result is CheckResult.FAILED
    broken = ProbeAnswer("", [("look", '{"at": ')])
    good = ProbeAnswer("", [("look", '{"at": 1}')])
    assert checks_of([ProbePair(TOOLS, good, broken)] * 8).reason.startswith("invalid tool calls: 8 of 8")
    long = ProbeAnswer(" ".join(f"word{number}" for number in range(400)), cut=True)
    check = checks_of([ProbePair(OPEN, FINE, long)] * 8)
    assert check.result is not CheckResult.FAILED
    assert (check.figures["words"], check.figures["parent_words"], check.figures["cut"]) == (400.0, 3.0, 1.0)


def test_repetition_is_the_share_of_sequences_that_occurred_before() -> None:
    assert repeated_share("a b a b a b") == 0.0  # too short to tell
    assert repeated_share("one two three four " * 10) == pytest.approx(33 / 37)
    assert not is_broken(ProbeAnswer("", [("look", "{}")]))
    assert has_valid_calls(ProbeAnswer("", [("look", "")]))
    assert not has_valid_calls(ProbeAnswer("", [("", "{}")]))
    assert not has_valid_calls(ProbeAnswer("", [("look", "[1]")]))


def test_a_version_that_was_not_asked_is_not_rejected() -> None:
    check = not_asked("no engine has version 3 of default")
    assert (check.result, check.reason) == (CheckResult.NOT_ENOUGH, "not asked: no engine has version 3 of default")


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_sign_test_is_a_chance_and_falls_with_the_evidence(worse: int, better: int) -> None:
    assert 0 < sign_test(worse, better) <= 1
    assert sign_test(worse + 1, better) < sign_test(worse, better) or worse + better == 0


@pytest.mark.parametrize(
    ("checks", "text", "right"),
    [
        ({}, "anything", None),
        ({"contains": ["Four"]}, "it is FOUR.", True),
        ({"contains": ["four", "five"]}, "four", False),
        ({"regex": r"\b4\b"}, "It is 4.", True),
        ({"regex": r"^4$"}, "It is 4.", False),
        ({"exact": "4"}, " 4\n", True),
        ({"exact": "4", "contains": ["5"]}, "4", False),
    ],
)
def test_content_checks(checks: dict[str, object], text: str, right: bool | None) -> None:
    assert is_right(ProbeContent(messages=[], **checks), text) is right  # type: ignore[arg-type]


def test_a_pattern_that_backtracks_elsewhere_takes_no_time() -> None:
    assert is_right(ProbeContent(messages=[], regex="(a+)+$"), "a" * 5000 + "b") is False
    assert pattern_problem("(a+)+$") is None
    assert "unclosed" in str(pattern_problem("(a"))
