"""The canary's sequential test: rarely wrong however often it is looked at, and it ends in time."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from clawloop.core.contracts.training import CheckResult
from clawloop.core.gate.canary import MIN_SESSIONS, CanaryEnd, decide_canary

LIMIT = 24.0


def session(rng: random.Random, praise: float) -> float:
    """The mean verdict of a session of four turns; sessions differ, so its turns are not independent."""
    own = min(1.0, max(0.0, praise + rng.choice((-0.2, 0.2))))
    return sum(1 if rng.random() < own else -1 for _ in range(4)) / 4


def end(seed: int, canary: float, others: float, most: int = 200) -> CanaryEnd | None:
    """How a canary ends that is looked at after each pair of sessions."""
    rng = random.Random(seed)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(most):
        ours.append(session(rng, canary))
        theirs.append(session(rng, others))
        if (decision := decide_canary(ours, theirs, 1.0, LIMIT)) is not None:
            return decision.end
    return None


def share(wanted: Callable[[CanaryEnd | None], bool], canary: float, others: float) -> float:
    return sum(wanted(end(seed, canary, others)) for seed in range(100)) / 100


def test_an_equal_version_is_rarely_called_worse_or_better_although_each_session_is_looked_at() -> None:
    assert share(lambda found: found in (CanaryEnd.WORSE, CanaryEnd.BETTER), 0.7, 0.7) <= 0.05


def test_a_worse_version_is_found_worse_and_a_better_one_never() -> None:
    assert share(lambda found: found is CanaryEnd.WORSE, 0.4, 0.8) >= 0.95
    assert share(lambda found: found is CanaryEnd.WORSE, 0.8, 0.6) == 0.0
    assert share(lambda found: found in (CanaryEnd.BETTER, CanaryEnd.AS_GOOD), 0.8, 0.6) >= 0.9


def test_with_time_an_equal_version_is_as_good() -> None:
    rng = random.Random(1)
    ours, theirs = ([session(rng, 0.7) for _ in range(400)] for _ in range(2))
    decision = decide_canary(ours, theirs, 1.0, LIMIT)
    assert decision is not None
    assert (decision.end, decision.check.result) == (CanaryEnd.AS_GOOD, CheckResult.PASSED)


@pytest.mark.parametrize(("sessions", "words"), [(0, "no traffic in 24 h"), (3, "too little traffic in 24 h")])
def test_without_traffic_it_ends_by_time_and_says_so(sessions: int, words: str) -> None:
    assert decide_canary([1.0] * sessions, [1.0] * 50, 23.9, LIMIT) is None
    decision = decide_canary([1.0] * sessions, [1.0] * 50, LIMIT, LIMIT)
    assert decision is not None
    assert (decision.end, decision.check.result) == (CanaryEnd.OUT_OF_TIME, CheckResult.NOT_ENOUGH)
    assert decision.check.reason.startswith(words)


def test_what_is_undecided_ends_by_time_without_being_rejected() -> None:
    few = [1.0, -1.0] * (MIN_SESSIONS // 2)
    assert decide_canary(few, few, 1.0, LIMIT) is None
    decision = decide_canary(few, few, LIMIT, LIMIT)
    assert decision is not None
    assert decision.check.reason.startswith("neither better nor worse within 24 h: mean verdict +0.00")


def test_sessions_that_agree_by_chance_are_not_certain() -> None:
    assert decide_canary([0.0] * MIN_SESSIONS, [0.25] * MIN_SESSIONS, 1.0, LIMIT) is None
