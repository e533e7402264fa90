"""The replay of held-out turns: decided by a paired bootstrap, and only with enough turns."""

from __future__ import annotations

import random
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.contracts.training import CheckResult, HeldOutScore
from clawloop.core.gate.checks import MARGIN, MIN_TURNS, check_replay
from clawloop.core.samples.decision import is_held_out


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
