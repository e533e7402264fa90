"""Checks of the gate: numbers, probes, replay, canary."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.contracts.training import (
    CheckResult,
    Distance,
    GateCheck,
    HeldOutScore,
    JudgedReply,
    ProbeAnswer,
    ProbeContent,
    StepFigures,
)
from clawloop.core.gate.canary import MIN_SESSIONS, JudgedSessions, check_canary
from clawloop.core.gate.checks import (
    MARGIN,
    MIN_TURNS,
    AnswerScores,
    ProbePair,
    ProbeScores,
    check_numbers,
    check_probes,
    check_replay,
    has_valid_calls,
    is_broken,
    is_right,
    liked_longer,
    not_asked,
    pattern_problem,
    repeated_share,
    sign_test,
)
from clawloop.core.recipes.recipe import Gate
from clawloop.core.samples.decision import is_held_out
from clawloop.operations.probes import read_probe_lines, read_probes

# The check of a step's numbers: each figure beyond its limit is named with its key.

HEALTHY = StepFigures(
    loss=0.4,
    parts={"policy_gradient": 0.4},
    grad_norm=1.5,
    ratio=1.0,
    kl=30.0,  # one rare token: reported, and not compared with anything
    tokens=80,
    samples={},
    dropped={},
    micro_batches=1,
    fillers=0,
    to_parent=Distance(mean=0.1, median=0.02, share=0.01),
    to_base=Distance(mean=0.4, median=0.1, share=0.05),
)


def test_healthy_numbers_pass_whatever_the_unbounded_mean_says() -> None:
    check = check_numbers(HEALTHY, Gate())
    assert (check.result, check.reason) == (CheckResult.PASSED, "within limits")
    assert check.figures["parent_distance"] == 0.1


@pytest.mark.parametrize(
    ("figures", "key"),
    [
        (replace(HEALTHY, loss=-2000.0), "gate.loss"),
        (replace(HEALTHY, grad_norm=math.nan), "gate.grad_norm"),
        (replace(HEALTHY, to_parent=Distance(mean=0.64, median=0.0, share=0.05)), "gate.parent_distance"),
        (replace(HEALTHY, to_parent=Distance(mean=0.3, median=0.0, share=0.13)), "gate.token_share"),
        (replace(HEALTHY, to_base=Distance(mean=3.5, median=3.0, share=0.9)), "gate.base_distance"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_number_beyond_its_limit_fails_with_its_key(figures: StepFigures, key: str) -> None:
    check = check_numbers(figures, Gate())
    assert check.result is CheckResult.FAILED
    assert f"({key})" in check.reason


def test_what_was_not_measured_is_not_compared() -> None:
    check = check_numbers(replace(HEALTHY, to_parent=None, to_base=None), Gate())
    assert check.result is CheckResult.PASSED
    assert check.figures["base_distance"] is None


@given(st.floats(0, 5), st.floats(0.01, 5))
def test_a_distance_fails_exactly_above_its_limit(mean: float, limit: float) -> None:
    figures = replace(HEALTHY, to_parent=Distance(mean=mean, median=0.0, share=0.0))
    failed = check_numbers(figures, Gate(parent_distance=limit)).result is CheckResult.FAILED
    assert failed == (mean > limit)


# The check by probes: evidence rejects, a difference within chance does not.

CHECKED = ProbeContent(messages=[{"role": "user", "content": "2 + 2?"}], contains=["4"])
OPEN = ProbeContent(messages=[{"role": "user", "content": "Hello"}])
TOOLS = ProbeContent(messages=OPEN.messages, tools=[{"type": "function", "function": {"name": "look"}}])
FINE = ProbeAnswer("It is 4.")
FORM = "looping, empty or cut answers"


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


@pytest.mark.parametrize(("lost", "own", "general"), [(2, True, False), (3, True, False), (4, True, True)])
def test_of_general_questions_the_loss_less_its_standard_error_is_bounded(lost: int, own: bool, general: bool) -> None:
    scores = [ProbeScores.of(pair) for pair in [*[KEPT] * (28 - lost), *[LOST] * lost]]
    assert (check_probes(scores, 0.05).result is CheckResult.FAILED) == own
    ours = [replace(each, general=True) for each in scores]
    assert (check_probes(ours, 0.05).result is CheckResult.FAILED) == general


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


def test_loops_empty_and_cut_answers_and_invalid_tool_calls_are_evidence() -> None:
    loop = ProbeAnswer("the same words again and " * 20)
    assert checks_of([ProbePair(OPEN, FINE, loop)] * 8).reason.startswith(f"{FORM}: 8 of 8")
    for answer in (ProbeAnswer(" "), ProbeAnswer("!" * 64), ProbeAnswer("", cut=True)):
        assert checks_of([ProbePair(OPEN, FINE, answer)] * 8).reason.startswith(f"{FORM}: 8 of 8")
    broken = ProbeAnswer("", [("look", '{"at": ')])
    good = ProbeAnswer("", [("look", '{"at": 1}')])
    assert checks_of([ProbePair(TOOLS, good, broken)] * 8).reason.startswith("invalid tool calls: 8 of 8")
    long = ProbeAnswer(" ".join(f"word{number}" for number in range(400)), cut=True)
    check = checks_of([ProbePair(OPEN, FINE, long)] * 8)
    assert check.reason.startswith(f"{FORM}: 8 of 8")
    assert (check.figures["words"], check.figures["parent_words"], check.figures["cut"]) == (400.0, 3.0, 1.0)
    assert checks_of([ProbePair(OPEN, long, long)] * 8).result is not CheckResult.FAILED
    assert checks_of([ProbePair(OPEN, FINE, replace(long, cut=False))] * 8).result is not CheckResult.FAILED


def of_form(version: ProbeAnswer, parent: ProbeAnswer = FINE, base: ProbeAnswer | None = FINE) -> ProbeScores:
    """Scores of a probe whose content all know."""
    of_base = None if base is None else AnswerScores.of(base)
    return ProbeScores(AnswerScores.of(parent), AnswerScores.of(version), False, True, True, None, True, of_base)


def test_faults_that_each_version_adds_a_few_of_are_seen_beside_the_base_model() -> None:
    fine, cut = of_form(FINE), ProbeAnswer("and so on and", cut=True)
    added, inherited = of_form(cut), of_form(cut, parent=cut)
    check = check_probes([*[fine] * 40, *[inherited] * 5, *[added] * 3])
    assert check.reason.startswith(f"{FORM}: 8 of 8 probes on which the version and the base model differ")
    assert check_probes([*[fine] * 40, *[inherited] * 8]).result is CheckResult.PASSED  # it adds none
    assert check_probes([*[fine] * 40, *[of_form(cut, cut, cut)] * 8]).result is CheckResult.PASSED


def words(count: int) -> ProbeAnswer:
    return ProbeAnswer(" ".join(f"word{number}" for number in range(count)))


def judged(better: Callable[[int], bool], count: int = 40) -> list[JudgedReply]:
    """Replies of 10, 11, … tokens, praised if the number is among the better ones."""
    return [JudgedReply(tokens, 1 if better(tokens) else -1) for tokens in range(10, 10 + count)]


EVEN_ONES_LIKED = judged(lambda tokens: tokens % 2 == 0)
LONG_ONES_LIKED = judged(lambda tokens: tokens >= 30)


def test_answers_that_grow_are_rejected_unless_longer_ones_are_liked_better() -> None:
    grown = [of_form(words(61), parent=words(59), base=words(40))] * 8
    check = check_probes(grown, 1.0, 1.5, EVEN_ONES_LIKED)
    assert check.reason == (
        "longer answers: 61 words at the median, the base model's 40, limit 1.5 times (gate.length_growth); "
        "longer replies are not liked better"
    )
    assert (check.figures["median_words"], check.figures["base_median_words"]) == (61, 40)
    for passes in (
        check_probes(grown, 1.0, 1.5, LONG_ONES_LIKED),
        check_probes(grown, 1.0, 1.6, EVEN_ONES_LIKED),
        check_probes(grown, 1.0, 1.5, judged(lambda tokens: False)),  # nothing is liked yet
        check_probes(grown[:7], 1.0, 1.5, EVEN_ONES_LIKED),
        check_probes([of_form(words(61), words(61), words(40))] * 8, 1.0, 1.5, EVEN_ONES_LIKED),  # its parent's length
        check_probes([of_form(words(19), words(3), words(3))] * 8, 1.0, 1.5, EVEN_ONES_LIKED),  # a greeting more
    ):
        assert passes.result is CheckResult.PASSED
    first = [of_form(words(61), parent=words(40), base=None)] * 8  # the parent is the base model
    assert check_probes(first, 1.0, 1.5, judged(lambda tokens: True)).result is CheckResult.FAILED


@pytest.mark.parametrize("verdicts", [(), EVEN_ONES_LIKED[:15], LONG_ONES_LIKED[-15:]], ids=["none", "few", "liked"])
def test_without_enough_verdicts_the_limit_alone_bounds_growth(verdicts: Sequence[JudgedReply]) -> None:
    grown = [of_form(words(61), parent=words(59), base=words(40))] * 8
    check = check_probes(grown, 1.0, 1.5, verdicts)
    assert check.reason == (
        "longer answers: 61 words at the median, the base model's 40, limit 1.5 times (gate.length_growth); "
        f"{len(verdicts)} verdicts or ratings say whether longer ones are liked better, 16 are needed"
    )
    assert check_probes(grown, 1.0, 1.6, verdicts).result is CheckResult.PASSED


def test_whether_longer_replies_are_liked_is_told_by_their_ranks() -> None:
    assert liked_longer(LONG_ONES_LIKED) is True
    assert liked_longer(judged(lambda tokens: tokens < 30)) is False
    assert liked_longer(EVEN_ONES_LIKED) is False
    assert liked_longer(judged(lambda tokens: True)) is False
    assert liked_longer([JudgedReply(5, 1 if place % 2 else -1) for place in range(40)]) is False  # all as long
    assert liked_longer(judged(lambda tokens: tokens >= 30, 25)) is None  # five are praised
    assert liked_longer([]) is None


# The planted streams that ended a replication: what each step makes is asked of the gate, and served if it passes.


def serve_stream(candidate_of: Callable[[Served, int], Served], verdicts: Sequence[JudgedReply]) -> list[Served]:
    """The versions that answer after each of 60 steps, each candidate made from the one that answers."""
    base = served = Served(40.0, 0.0)
    history = []
    for step in range(60):
        candidate = candidate_of(served, step)
        asked = [
            replace(
                of_form(candidate.answer(probe), served.answer(probe), None if served == base else base.answer(probe)),
                right=candidate.is_right(probe),
                right_parent=served.is_right(probe),
                right_base=None if served == base else base.is_right(probe),
            )
            for probe in range(40)
        ]
        if check_probes(asked, 0.05, 1.5, verdicts).result is not CheckResult.FAILED:
            served = candidate
        history.append(served)
    return history


@dataclass(frozen=True)
class Served:
    """A version by what its answers are like: their words, and the share of them that is garbage."""

    words: float
    garbage: float

    def answer(self, probe: int) -> ProbeAnswer:
        kinds = (ProbeAnswer("!" * 64), ProbeAnswer("", cut=True), ProbeAnswer("again and again " * 40, cut=True))
        # The same probes fail first with every version, as the weakest do.
        return kinds[probe % 3] if probe < self.garbage * 40 else words(round(self.words) + probe % 5)

    def is_right(self, probe: int) -> bool:
        """True if the answer holds what was asked for, somewhere in its first ten words."""
        return f"word{probe % 10}" in self.answer(probe).text.split()


def test_a_stream_whose_replies_grow_by_3_percent_a_step_never_serves_one_that_is_half_as_long_again() -> None:
    grows = serve_stream(lambda served, step: replace(served, words=served.words * 1.03), EVEN_ONES_LIKED)
    assert max(version.words for version in grows) <= 1.5 * 42
    assert grows[-1].words > 55  # it was not the first growth that was rejected
    wanted = serve_stream(lambda served, step: replace(served, words=served.words * 1.03), LONG_ONES_LIKED)
    assert wanted[-1].words > 200
    nobody_judges = serve_stream(lambda served, step: replace(served, words=served.words * 1.03), ())
    assert 55 < nobody_judges[-1].words <= 1.5 * 42


def test_a_stream_whose_replies_shrink_to_nothing_never_serves_one_without_content() -> None:
    def shrinks(served: Served, step: int) -> Served:
        return replace(served, words=served.words * 0.9)

    for verdicts in ((), EVEN_ONES_LIKED):
        served = serve_stream(shrinks, verdicts)[-1]
        assert 5 < served.words < 10  # brief, and right where the base model is
        assert sum(served.is_right(probe) for probe in range(40)) >= 0.95 * 40


def test_a_stream_that_learns_garbage_never_serves_a_version_of_which_a_tenth_is_garbage() -> None:
    at_once = serve_stream(lambda served, step: replace(served, garbage=served.garbage + 0.2), EVEN_ONES_LIKED)
    assert {version.garbage for version in at_once} == {0.0}
    slowly = serve_stream(lambda served, step: replace(served, garbage=served.garbage + 0.025), EVEN_ONES_LIKED)
    assert 0 < max(version.garbage for version in slowly) <= 0.05


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


# The replay of held-out turns: decided by a paired bootstrap, and only with enough turns.


def scores(praised: int, blamed: int, change: float, noise: float = 0.1, seed: int = 1) -> list[HeldOutScore]:
    """Turns whose preference for praised over blamed replies changed by `change`, with noise on each."""
    rng = random.Random(seed)
    verdicts = [1] * praised + [-1] * blamed
    return [HeldOutScore(v, -1.0, -1.0 + v * change / 2 + rng.gauss(0, noise)) for v in verdicts]


def test_too_few_turns_decide_nothing() -> None:
    for praised, blamed, why in (
        (0, 0, ", 32 are needed"),
        (16, 15, ", 32 are needed"),
        (40, 7, ", of 40 and 7 sessions or groups, 8 of each are needed"),
        (0, 64, ", of 0 and 64 sessions or groups, 8 of each are needed"),
    ):
        check = check_replay(scores(praised, blamed, -5.0), "a")
        assert check.result is CheckResult.NOT_ENOUGH
        assert check.reason == f"{praised} praised and {blamed} blamed turns held out{why}"


def test_turns_of_one_session_count_once() -> None:
    turns = scores(32, 32, -5.0)
    of_seven = [replace(turn, unit=UUID(int=at % 7)) for at, turn in enumerate(turns)]
    check = check_replay(of_seven, "a")
    assert check.result is CheckResult.NOT_ENOUGH
    assert check.reason.endswith(" of 7 and 7 sessions or groups, 8 of each are needed")
    of_eight = [replace(turn, unit=UUID(int=at % 8)) for at, turn in enumerate(turns)]
    assert check_replay(of_eight, "a").result is CheckResult.FAILED


def test_sessions_that_change_as_a_whole_call_few_versions_worse() -> None:
    """Eight turns of one verdict in each of 16 sessions, whose changes correlate by 0.4: by turn 39 of 160 fail."""
    failed = 0
    for seed in range(160):
        rng = random.Random(seed)
        turns = []
        for session in range(16):
            verdict, common = (1 if session % 2 else -1), rng.gauss(0, 0.4**0.5)
            change = -verdict * MARGIN / 2 + common
            turns += [
                HeldOutScore(verdict, -1.0, -1.0 + change + rng.gauss(0, 0.6**0.5), UUID(int=session)) for _ in range(8)
            ]
        failed += check_replay(turns, str(seed)).result is CheckResult.FAILED
    assert failed <= 0.09 * 160, failed


def test_a_version_that_prefers_blamed_replies_fails_and_a_better_one_passes() -> None:
    worse, better = check_replay(scores(20, 20, -0.4), "a"), check_replay(scores(20, 20, 0.4), "a")
    assert (worse.result, better.result) == (CheckResult.FAILED, CheckResult.PASSED)
    assert (worse.figures["praised"], worse.figures["blamed"]) == (20, 20)
    assert worse.reason.startswith("preference for praised over blamed replies changed by -0.4")


def test_a_change_within_noise_passes() -> None:
    assert check_replay(scores(20, 20, -0.02, noise=0.5), "a").result is CheckResult.PASSED


def test_a_loss_that_is_certain_and_tiny_passes() -> None:
    # Of a step of the demo at which there was nothing left to learn.
    check = check_replay(scores(20, 20, -0.003, noise=0.001), "a")
    assert check.result is CheckResult.PASSED
    assert -MARGIN < (check.figures["upper_bound"] or 0) < 0
    assert check_replay(scores(20, 20, -0.02, noise=0.001), "a").result is CheckResult.FAILED


@pytest.mark.parametrize(("praised", "blamed"), [(16, 16), (24, 8)])
def test_of_a_loss_at_the_margin_about_one_version_in_twenty_fails(praised: int, blamed: int) -> None:
    """Independent turns, fixed seeds; plain percentiles of the draws fail 16 and 15 of these 160."""
    failed = [
        check_replay(scores(praised, blamed, -MARGIN, seed=s), str(s)).result is CheckResult.FAILED for s in range(160)
    ]
    assert 0.02 * 160 <= sum(failed) <= 0.09 * 160, sum(failed)


@given(st.lists(st.tuples(st.sampled_from([-1, 1]), st.floats(-9, 0), st.floats(-9, 0)), max_size=80), st.text())
def test_the_same_turns_and_version_give_the_same_result(turns: list[tuple[int, float, float]], seed: str) -> None:
    given_scores = [HeldOutScore(*turn) for turn in turns]
    check = check_replay(given_scores, seed)
    assert check == check_replay(given_scores, seed)
    if len(turns) < MIN_TURNS:
        assert check.result is CheckResult.NOT_ENOUGH
    unchanged = check_replay([HeldOutScore(s.verdict, s.parent, s.parent) for s in given_scores], seed)
    assert unchanged.result is not CheckResult.FAILED


@given(st.uuids(), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_share_holds_out_the_same_units_and_more(unit: UUID, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert is_held_out("default", unit, high) or not is_held_out("default", unit, low)
    assert not is_held_out("default", unit, 0.0)
    assert is_held_out("default", unit, 1.0)


def test_about_the_share_of_units_is_held_out_and_each_policy_holds_out_others() -> None:
    units = [UUID(int=n) for n in range(2000)]
    one, other = ({unit for unit in units if is_held_out(policy, unit, 0.1)} for policy in ("one", "other"))
    assert 150 < len(one) < 250
    assert 150 < len(other) < 250
    assert len(one & other) < 50


# The canary's sequential test: rarely wrong however often it is looked at, and it ends in time.

LIMIT = 24.0


def decided(canary: list[float], others: list[float], hours: float) -> GateCheck | None:
    return check_canary(JudgedSessions(canary, others, hours), Gate(canary_hours=LIMIT))


def session(rng: random.Random, praise: float) -> float:
    """The mean verdict of a session of four turns; sessions differ, so its turns are not independent."""
    own = min(1.0, max(0.0, praise + rng.choice((-0.2, 0.2))))
    return sum(1 if rng.random() < own else -1 for _ in range(4)) / 4


def end(seed: int, canary: float, others: float, most: int = 200) -> str | None:
    """How a canary ends that is looked at after each pair of sessions."""
    rng = random.Random(seed)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(most):
        ours.append(session(rng, canary))
        theirs.append(session(rng, others))
        if (decision := decided(ours, theirs, 1.0)) is not None:
            return decision.reason.partition(":")[0]
    return None


def share(wanted: Callable[[str | None], bool], canary: float, others: float) -> float:
    return sum(wanted(end(seed, canary, others)) for seed in range(100)) / 100


def test_an_equal_version_is_rarely_called_worse_or_better_although_each_session_is_looked_at() -> None:
    assert share(lambda found: found in ("worse", "better"), 0.7, 0.7) <= 0.05


def test_a_worse_version_is_found_worse_and_a_better_one_never() -> None:
    assert share(lambda found: found == "worse", 0.4, 0.8) >= 0.95
    assert share(lambda found: found == "worse", 0.8, 0.6) == 0.0
    assert share(lambda found: found in ("better", "as good"), 0.8, 0.6) >= 0.9


def test_with_time_an_equal_version_is_as_good() -> None:
    rng = random.Random(1)
    ours, theirs = ([session(rng, 0.7) for _ in range(400)] for _ in range(2))
    decision = decided(ours, theirs, 1.0)
    assert decision is not None
    assert decision.result is CheckResult.PASSED
    assert decision.reason.startswith("as good: ")


@pytest.mark.parametrize(("sessions", "words"), [(0, "no traffic in 24 h"), (3, "too little traffic in 24 h")])
def test_without_traffic_it_ends_by_time_and_says_so(sessions: int, words: str) -> None:
    assert decided([1.0] * sessions, [1.0] * 50, 23.9) is None
    decision = decided([1.0] * sessions, [1.0] * 50, LIMIT)
    assert decision is not None
    assert decision.result is CheckResult.NOT_ENOUGH
    assert decision.reason.startswith(words)


def test_what_is_undecided_ends_by_time_without_being_rejected() -> None:
    few = [1.0, -1.0] * (MIN_SESSIONS // 2)
    assert decided(few, few, 1.0) is None
    decision = decided(few, few, LIMIT)
    assert decision is not None
    assert decision.reason.startswith("neither better nor worse within 24 h: mean verdict +0.00")


def test_sessions_that_agree_by_chance_are_not_certain() -> None:
    assert decided([0.0] * MIN_SESSIONS, [0.25] * MIN_SESSIONS, 1.0) is None


# What operators write as probes: each fault is named by its line.


def test_lines_become_probes_and_empty_ones_are_skipped() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    lines = [
        {"prompt": "2 + 2?", "contains": "4"},
        {"messages": [{"role": "user", "content": "Look."}], "tools": tools, "contains": ["a", "b"], "regex": "^a"},
    ]
    probes, faults = read_probe_lines("\n\n".join(map(json.dumps, lines)))
    assert faults == {}
    assert [list(probe.contains) for probe in probes] == [["4"], ["a", "b"]]
    assert probes[0].messages == [{"role": "user", "content": "2 + 2?"}]
    assert (probes[1].tools, probes[1].regex, probes[1].exact) == (tools, "^a", None)


def test_a_text_may_hold_what_unicode_calls_a_line_end() -> None:
    probes, faults = read_probe_lines('{"prompt": "one\u2028two"}\r\n{"prompt": "three\x85four"}\n')
    assert faults == {}
    assert [probe.messages[0]["content"] for probe in probes] == ["one\u2028two", "three\x85four"]


def test_every_bad_line_is_named() -> None:
    bad = [
        "{",
        "[1]",
        "{}",
        '{"prompt": "a", "messages": []}',
        '{"prompt": 3}',
        '{"prompt": "a", "regex": "(a"}',
        '{"prompt": "a", "contain": "b"}',
        '{"messages": [{"role": "assistant", "content": "a"}]}',
        '{"prompt": "a", "contains": ""}',
    ]
    probes, faults = read_probe_lines("\n".join(['{"prompt": "fine"}', *bad]))
    assert (len(probes), list(faults)) == (1, list(range(2, 11)))
    assert faults[2].startswith("not JSON")
    assert faults[3].startswith("no JSON object")
    assert faults[4] == "give either prompt or messages"
    assert faults[5].startswith("messages: List should have at least 1 item")
    assert faults[6] == "prompt: Input should be a valid string"
    assert "unclosed" in faults[7]
    assert faults[8] == "unknown key 'contain'; a probe has prompt, messages, tools, contains, regex, exact"
    assert faults[9].startswith("messages: the last message must be the user's or a tool's")
    assert faults[10].startswith("contains: ")


def test_a_long_probe_is_refused() -> None:
    _, faults = read_probes([{"prompt": "x" * 100_001}, {"messages": [{"role": "user", "content": "x" * 100_001}]}])
    assert sorted(faults) == [0, 1]
    assert faults[1] == "messages: longer than 100000 characters"
