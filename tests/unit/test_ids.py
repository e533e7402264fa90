"""Ids are ordered by time, also where the clock is not."""

from __future__ import annotations

import time

import pytest

from clawloop.core.ids import new_turn_id

HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize("jump_ns", [-HOUR_NS, HOUR_NS])
def test_a_turn_id_is_greater_than_those_before_it_when_the_clock_jumps(
    monkeypatch: pytest.MonkeyPatch, jump_ns: int
) -> None:
    before = [new_turn_id() for _ in range(3)]
    now = time.time_ns
    with monkeypatch.context() as jumped:
        jumped.setattr(time, "time_ns", lambda: now() + jump_ns)
        after = [new_turn_id() for _ in range(3)]
    set_right = [new_turn_id() for _ in range(3)]
    ids = [*before, *after, *set_right]
    assert ids == sorted(set(ids))
