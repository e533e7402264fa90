"""Metrics of judging, closing and sweeping."""

from __future__ import annotations

import pytest

from activities.sweep import SweepActivities
from clawloop.core.errors import JudgeUnavailable
from db.sweep import PostgresSweepStore
from tests.fakes.notifier import FakeNotifier
from tests.judging.conftest import Bench
from tests.judging.test_sweep import IDLE


async def test_votes_hints_outcomes_and_requests_are_counted(bench: Bench) -> None:
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    bench.judge.votes = [1, "what?", 1, "what again?"]
    await bench.judge_turn(session, second)
    assert bench.counted("judge_answers_total", kind="vote", result="valid") == 2
    assert bench.counted("judge_answers_total", kind="vote", result="missing") == 1
    assert bench.counted("judge_answers_total", kind="hint", result="valid") == 3
    assert bench.counted("turns_judged_total", outcome="sampled") == 1
    # All votes, the unreadable one once more, all hints.
    assert bench.counted("judge_request_seconds_count", result="answered") == 3


async def test_failed_requests_are_timed_as_failed_and_judge_nothing(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    bench.judge.mode = "500"
    with pytest.raises(JudgeUnavailable):
        await bench.judge_turn(session, second)
    assert bench.counted("judge_request_seconds_count", result="unavailable") == 1
    assert bench.counted("turns_judged_total", outcome="unjudged") == 0
    bench.judge.mode = "401"
    await bench.judge_turn(session, second)
    assert bench.counted("judge_request_seconds_count", result="refused") == 1
    assert bench.counted("turns_judged_total", outcome="unjudged") == 1
    assert bench.counted("judge_answers_total", kind="vote", result="missing") == 3


async def test_closed_sessions_and_sweeps_are_counted(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    sweeper = SweepActivities(
        PostgresSweepStore(bench.database), FakeNotifier(), bench.work, IDLE, IDLE * 0, counter=bench.metrics
    )
    await sweeper.sweep()
    await sweeper.sweep()
    assert bench.counted("sweeps_total") == 2
    assert bench.counted("swept_total", what="turns") == 2
    bench.judge.votes = [1, 0, 0]
    await bench.judge_turn(session, second)
    await bench.close(session)
    await bench.close(session)
    assert bench.counted("sessions_closed_total", guaranteed="true") == 1
    assert bench.counted("sessions_closed_total", guaranteed="false") == 1
