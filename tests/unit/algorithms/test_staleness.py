"""Staleness of samples, and when they expire."""

from __future__ import annotations

import pytest

from clawloop.core.algorithms.rewards import has_drifted, is_stale, versions_apart

# 0 → 1 → 2 → 3 → 4, then rolled back to 2: 2 → 5 → 6.
PARENTS = {1: 0, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5}


@pytest.mark.parametrize(("version", "head", "apart"), [(4, 4, 0), (0, 4, 4), (2, 6, 2), (4, 6, 4), (4, 2, 2)])
def test_the_distance_of_versions_is_the_number_of_steps_between_them(version: int, head: int, apart: int) -> None:
    assert versions_apart(version, head, PARENTS) == versions_apart(head, version, PARENTS) == apart


def test_an_unknown_version_raises() -> None:
    with pytest.raises(KeyError):
        versions_apart(9, 4, PARENTS)


def test_next_state_evidence_ages_and_explicit_feedback_does_not() -> None:
    assert not is_stale(4, bound=4, explicit=False)
    assert is_stale(5, bound=4, explicit=False)
    assert not is_stale(500, bound=4, explicit=True)


def test_explicit_feedback_drifts_beyond_a_mean_log_ratio_of_one() -> None:
    assert not has_drifted(1.0, bound=1.0, explicit=True)
    assert has_drifted(1.01, bound=1.0, explicit=True)
    assert not has_drifted(1.01, bound=1.0, explicit=False)
