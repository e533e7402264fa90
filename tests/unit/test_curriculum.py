"""The rule of curricula: what it does with counts, and how it follows a policy that learns."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.episodes.curriculum import ENOUGH, HIGH, LOW, Counted, KindState, Trial, draw, revise, success_of
from clawloop.core.episodes.kinds import KINDS, Levels
from clawloop.environments.browser import kinds as browser
from clawloop.environments.swe.environment import FUNCTIONS_BY_NAME
from clawloop.environments.terminal.environment import KINDS_BY_NAME

LEVELS = Levels(first=2, hardest=4)
SIZE = 8


def _groups(success: float, episodes: int = ENOUGH) -> list[Counted]:
    return [Counted(SIZE, round(SIZE * success))] * (episodes // SIZE)


_COUNTS = st.lists(st.integers(0, SIZE).map(lambda n: Counted(SIZE, n)), max_size=12)
_TRIALS = st.none() | st.builds(Trial, st.integers(1, 4), st.floats(0, 1))
_STATES = st.builds(
    KindState,
    st.just("times"),
    st.integers(1, 4),
    st.sampled_from([1.0, 0.5, 0.25, 0.125]),
    st.sampled_from([ENOUGH, 2 * ENOUGH, 8 * ENOUGH]),
    _TRIALS,
)


@given(_STATES, _COUNTS)
def test_a_kind_stays_within_bounds_and_moves_by_one_level(state: KindState, groups: list[Counted]) -> None:
    after, why = revise(state, LEVELS, groups)
    assert (after, why) == revise(state, LEVELS, groups)
    assert (after == state) == (why == "")
    assert after == state or sum(group.scored for group in groups) >= state.needed
    assert 1 <= after.level <= LEVELS.hardest
    assert 0.125 <= after.weight <= 1
    assert ENOUGH <= after.patience <= 8 * ENOUGH
    if state.trial is None:
        success = success_of(groups)
        assert abs(after.level - state.level) <= 1
        assert after.level <= state.level or (success is not None and success > HIGH)
        assert after.level >= state.level or (success is not None and success < LOW)
    else:
        assert after.level in (state.level, state.trial.level)


@pytest.mark.parametrize(
    ("success", "before", "words"),
    [
        (0.875, 3, "level 3 instead of 2, on trial"),
        (0.125, 1, "level 1 instead of 2, on trial"),
        (0.75, 2, ""),
        (0.25, 2, ""),
    ],
)
def test_a_level_moves_where_success_leaves_the_range(success: float, before: int, words: str) -> None:
    after, why = revise(KindState("times", 2), LEVELS, _groups(success))
    assert after.level == before
    assert why.endswith(words)
    assert (after.trial is None) == (words == "")
    assert revise(KindState("times", 2), LEVELS, _groups(success)[1:]) == (KindState("times", 2), "")


@pytest.mark.parametrize(
    ("level", "was", "before", "after", "kept", "words"),
    [
        (3, 2, 0.9, 0.5, True, "kept"),
        (3, 2, 0.9, 1.0, False, "undone, not as meant"),
        (3, 2, 0.9, 0.125, False, "undone, too hard"),
        (1, 2, 0.1, 0.5, True, "kept"),
        (1, 2, 0.1, 1.0, True, "kept"),
        (1, 2, 0.125, 0.125, False, "undone, not as meant"),
    ],
)
def test_a_change_is_kept_only_if_success_moved_as_meant(
    level: int, was: int, before: float, after: float, kept: bool, words: str
) -> None:
    on_trial = KindState("times", level, trial=Trial(was, before))
    assert revise(on_trial, LEVELS, _groups(after)[1:]) == (on_trial, "")
    decided, why = revise(on_trial, LEVELS, _groups(after))
    assert why.endswith(words)
    assert decided == (KindState("times", level) if kept else KindState("times", was, 0.5, 2 * ENOUGH))


def test_where_no_level_is_left_a_kind_is_drawn_less_and_more_again_once_it_teaches() -> None:
    state = KindState("times", LEVELS.hardest)
    weights = []
    for _ in range(5):
        state, _ = revise(state, LEVELS, _groups(1.0))
        weights.append(state.weight)
    assert weights == [0.5, 0.25, 0.125, 0.125, 0.125]
    assert revise(state, LEVELS, _groups(0.5))[0] == KindState("times", LEVELS.hardest)


def test_only_the_newest_groups_count() -> None:
    assert success_of(_groups(0.5) + _groups(1.0)) == 0.5
    assert success_of([]) is None


def test_kinds_are_drawn_as_often_as_their_weights_say_and_evenly() -> None:
    states = [KindState("a", 1), KindState("b", 1, 0.5), KindState("c", 1, 0.5)]
    drawn = [draw(states, number).kind for number in range(400)]
    assert drawn == [draw(states, number).kind for number in range(400)]
    for start in range(0, 400, 40):
        counts = Counter(drawn[start : start + 40])
        assert abs(counts["a"] - 20) <= 3
        assert abs(counts["b"] - 10) <= 3


def _simulate(success: Callable[[int, int], float], groups: int, seed: int) -> list[KindState]:
    """The states after each group; `success` of the group's number and level."""
    drawn = random.Random(seed)
    state, counted, states = KindState("times", 1), list[Counted](), list[KindState]()
    for number in range(groups):
        probability = success(number, state.level)
        counted.insert(0, Counted(SIZE, sum(drawn.random() < probability for _ in range(SIZE))))
        after, why = revise(state, Levels(1, 6), counted)
        if why:
            counted.clear()
        state = after
        states.append(state)
    return states


def test_the_level_follows_a_policy_that_learns() -> None:
    """Its skill grows from 1 to 6 in 400 groups; at a level of its skill it succeeds half of the time."""

    def success(number: int, level: int) -> float:
        return 1 / (1 + math.exp(2 * (level - 1 - 5 * number / 400)))

    for seed in (1, 2, 3):
        states = _simulate(success, 400, seed)
        assert states == _simulate(success, 400, seed)
        levels = [state.level for state in states]
        assert levels[0] == 1
        assert levels[-1] >= 4
        told_apart = sum(0.1 < success(number, level) < 0.9 for number, level in enumerate(levels))
        stays_easy = sum(0.1 < success(number, 1) < 0.9 for number in range(400))
        assert told_apart > 0.8 * 400 > 2 * stays_easy


def test_a_level_that_changes_nothing_is_tried_ever_less_often_and_never_kept() -> None:
    states = _simulate(lambda _number, _level: 1.0, 400, 1)
    assert {state.level for state in states} == {1, 2}
    assert {state.level for state in states if state.trial is None} == {1}
    trials = [i for i in range(1, 400) if states[i].trial is not None and states[i - 1].trial is None]
    # A trial takes 4 groups, and is due after 8, 16 and then 32 further ones.
    assert [later - earlier for earlier, later in pairwise(trials)][:4] == [12, 20, 36, 36]
    assert states[-1].weight == 0.125


def test_the_kinds_are_those_of_the_environments() -> None:
    assert set(KINDS["terminal"]) == set(KINDS_BY_NAME)
    assert set(KINDS["swe"]) == set(FUNCTIONS_BY_NAME)
    assert set(KINDS["browser"]) == set(browser.KINDS_BY_NAME)
    assert set(KINDS["browser"].values()) == {Levels(browser.FIRST_LEVEL, browser.HARDEST_LEVEL)}
