"""Recipes that shape rewards, from the judge's vote to the sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clawloop.core.contracts.sessions import FeedbackEffect
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import new_turn_id
from db.judging.feedback import PostgresFeedbackStore
from tests.judging.conftest import Bench, set_recipe, with_signal


@pytest.mark.parametrize(
    ("ids", "reason", "votes", "expected"),
    [
        (900, "stop", [1], (0.5, TurnOutcome.SAMPLED, "verdict good: 3 of 3 votes good, length -0.50")),
        (3, "length", [-1], (-2.0, TurnOutcome.SAMPLED, "verdict bad: 3 of 3 votes bad, length -1.00")),
        (3, "length", [1], (None, TurnOutcome.UNDECIDED, "verdict good: 3 of 3 votes good, length -1.00")),
        (3, "length", [0], (None, TurnOutcome.UNDECIDED, "verdict neutral: 3 of 3 votes neutral")),
    ],
)
async def test_long_replies_get_a_smaller_reward(
    bench: Bench, ids: int, reason: str, votes: list[int | str], expected: tuple[float | None, TurnOutcome, str]
) -> None:
    await set_recipe(bench, with_signal(overlong={"limit_tokens": 1000, "cache_tokens": 200}))
    reply: dict[str, Any] = {"finish_reason": reason, "response_ids": [5] * ids, "logprobs": [-0.5] * ids}
    first, second = bench.conversation("one", "two", **reply)
    session = await bench.insert(first, second)
    bench.judge.votes = votes
    (result,) = await bench.judge_turn(session, second)
    reward, outcome, why = expected
    assert (result.outcome, result.why) == (outcome, why)
    assert [row["reward"] for row in bench.rows("SELECT reward FROM samples")] == ([] if reward is None else [reward])


async def test_the_mean_verdict_is_subtracted(bench: Bench) -> None:
    await set_recipe(bench, with_signal(baseline="mean"))
    turns = bench.conversation("one", "two", "three", "four")
    session = await bench.insert(*turns)
    told = []
    for vote, turn in zip([1, -1, 1], turns[1:], strict=True):
        bench.judge.votes = [vote]
        told += await bench.judge_turn(session, turn)
    assert [row["reward"] for row in bench.rows("SELECT reward FROM samples ORDER BY id")] == [1.0, -2.0, 1.0]
    assert [result.why for result in told] == [
        "verdict good: 3 of 3 votes good",
        "verdict bad: 3 of 3 votes bad; mean before +1.00",
        "verdict good: 3 of 3 votes good; mean before +0.00",
    ]
    assert bench.rows("SELECT verdict_count, verdict_total FROM policies") == [{"verdict_count": 3, "verdict_total": 1}]


async def test_responses_to_one_prompt_are_measured_against_each_other(bench: Bench) -> None:
    await set_recipe(bench, with_signal(reward="group"))
    first, second = bench.conversation("one", "Thanks!")
    other = replace(first, turn_id=new_turn_id(), choice=1, response={"role": "assistant", "content": "another"})
    first, other = (replace(turn, group_id=first.turn_id) for turn in (first, other))
    session = await bench.insert(first, other, second)
    bench.judge.votes = [1]
    (result,) = await bench.judge_turn(session, second)
    assert (result.outcome, result.sample) == (TurnOutcome.UNDECIDED, False)
    assert result.why == "waits for its group: 1 of 2 have a verdict (verdict good: 3 of 3 votes good)"
    given = bench.feedback(other, -1.0)
    (result,) = await bench.judge_turn(session, other, feedback_id=given)
    assert result.outcome is TurnOutcome.SAMPLED
    assert result.why == "-1.00 in its group of 2 (verdict bad: rated -1.00 by the user)"
    assert [row["reward"] for row in bench.rows("SELECT reward FROM samples ORDER BY turn_id")] == [1.0, -1.0]


async def test_closing_finalizes_a_group_that_stays_incomplete(bench: Bench) -> None:
    await set_recipe(bench, with_signal(reward="group", at_least_one=True))
    first, second = bench.conversation("one", "No.")
    other = replace(first, turn_id=new_turn_id(), choice=1, response={"role": "assistant", "content": "another"})
    first, other = (replace(turn, group_id=first.turn_id) for turn in (first, other))
    session = await bench.insert(first, other, second)
    bench.judge.votes = [-1]
    await bench.judge_turn(session, second)
    closed = await bench.close(session)
    assert closed.guarantee == "has a sample"
    reported = {result.turn_id: (result.outcome, result.why) for result in closed.results}
    assert reported[first.turn_id] == (
        TurnOutcome.SAMPLED,
        "the only verdict in its group: verdict bad: 3 of 3 votes bad",
    )
    assert reported[other.turn_id][0] is TurnOutcome.NO_FEEDBACK
    assert bench.rows("SELECT reward, state FROM samples") == [{"reward": -1.0, "state": "fresh"}]


async def test_a_sessions_outcome_reaches_every_main_turn(bench: Bench) -> None:
    await set_recipe(bench, with_signal(reward="outcome_process", process_weight=1.0))
    turns = bench.conversation("one", "two", "three")
    session = await bench.insert(*turns)
    for votes, turn in zip([[1, 1, -1], [-1, -1, -1]], turns[1:], strict=True):
        bench.judge.votes = [*votes]
        await bench.judge_turn(session, turn)
    feedback = PostgresFeedbackStore(bench.database)
    assert await feedback.give_outcome(bench.key, "default", "s", 1) is FeedbackEffect.AMENDS
    closed = await bench.close(session)
    assert closed.to_judge == [turns[2].turn_id]  # nothing followed it, but the outcome judges it too
    asked = len(bench.judge.requests)
    (result,) = await bench.judge_turn(session, turns[2], itself=True)
    assert (result.outcome, len(bench.judge.requests)) == (TurnOutcome.UNJUDGED, asked)
    closed = await bench.close(session)
    rewards = {row["turn_id"]: row["reward"] for row in bench.rows("SELECT turn_id, reward FROM samples")}
    assert rewards == {turns[0].turn_id: pytest.approx(4 / 3), turns[2].turn_id: 1.0}  # the second cancels out
    reported = {result.turn_id: result.why or "" for result in closed.results}
    assert reported[turns[2].turn_id] == "outcome +1 (nothing followed)"
    assert reported[turns[0].turn_id].startswith("outcome +1, process +0.33, judge +0.44 (")
    assert bench.rows("SELECT state FROM sessions") == [{"state": "closed"}]
