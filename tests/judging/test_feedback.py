"""Feedback on a turn outside the conversation, before and after the turn was judged."""

from __future__ import annotations

import asyncio

import pytest

from clawloop.core.contracts.sessions import FeedbackEffect
from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import StoreUnavailable
from db.judging.feedback import PostgresFeedbackStore
from tests.judging.conftest import Bench


async def test_a_rating_is_the_verdict_without_any_judge(bench: Bench) -> None:
    (only,) = bench.conversation("one")
    session = await bench.insert(only)
    given = bench.feedback(only, -0.5)
    (result,) = await bench.judge_turn(session, only, feedback_id=given)
    assert bench.judge.requests == []
    assert (result.verdict, result.sample) == (-1, True)
    assert result.why == "verdict bad: rated -0.50 by the user; no hint: nothing says what to do better"
    assert bench.rows("SELECT reward FROM samples") == [{"reward": -0.5}]
    assert bench.rows("SELECT applied_at IS NOT NULL AS applied FROM feedback") == [{"applied": True}]


async def test_a_rating_given_while_the_judge_thinks_outweighs_it(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    bench.judge.gate.clear()
    judging = asyncio.create_task(bench.judge_turn(session, second))
    async with asyncio.timeout(30):
        while not bench.judge.requests:
            await asyncio.sleep(0.01)
    (rated,) = await bench.judge_turn(session, first, feedback_id=bench.feedback(first, -1.0))
    bench.judge.gate.set()
    with pytest.raises(StoreUnavailable, match="decided meanwhile"):
        await judging
    # As Temporal retries:
    assert await bench.judge_turn(session, second) == [rated]
    assert rated.why == "verdict bad: rated -1.00 by the user"
    assert bench.rows("SELECT state, reward FROM samples") == [{"state": "fresh", "reward": -1.0}]
    assert len(bench.judge.requests) == 1


async def test_late_feedback_amends_a_judgement_whose_sample_is_fresh(bench: Bench) -> None:
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    asked = len(bench.judge.asked("vote"))
    bench.judge.hint = "Be shorter next time, please."
    given = bench.feedback(first, -1.0, "Too long.")
    (result,) = await bench.judge_turn(session, first, feedback_id=given)
    assert (result.verdict, result.outcome) == (-1, TurnOutcome.SAMPLED)
    assert len(bench.judge.asked("vote")) == asked  # the rating is the verdict
    assert "Too long." in bench.judge.asked("hint")[-1]["messages"][-1]["content"]
    (sample,) = bench.rows("SELECT * FROM samples")
    assert (sample["reward"], sample["hinted_prompts"] is not None) == (-1.0, True)
    assert [row["revision"] for row in bench.rows("SELECT revision FROM judgements")] == [0]
    # Judging again is idempotent.
    before = len(bench.judge.requests)
    assert await bench.judge_turn(session, first, feedback_id=given) == [result]
    assert len(bench.judge.requests) == before


async def test_a_turn_rated_at_once_gets_the_hint_that_comes_with_its_next_state(bench: Bench) -> None:
    first, second = bench.conversation("Add two numbers.", "No, in Python.")
    session = await bench.insert(first)
    await bench.judge_turn(session, first, feedback_id=bench.feedback(first, -1.0))
    await bench.insert(second)
    bench.judge.hint = "Write it in Python, not in JavaScript."
    (result,) = await bench.judge_turn(session, second)
    assert result.why == "verdict bad: rated -1.00 by the user; hint: the judge gave a usable hint in 3 of 3 answers"
    samples = bench.rows("SELECT state, reward, hinted_prompts IS NOT NULL AS hinted FROM samples ORDER BY id")
    assert [(row["state"], row["reward"], row["hinted"]) for row in samples] == [
        ("superseded", -1.0, False),
        ("fresh", -1.0, True),
    ]
    asked = len(bench.judge.requests)
    assert await bench.judge_turn(session, second) == [result]
    assert len(bench.judge.requests) == asked


async def test_a_next_state_that_comes_after_a_step_took_the_rating_changes_nothing(bench: Bench) -> None:
    first, second = bench.conversation("Add two numbers.", "No, in Python.")
    session = await bench.insert(first)
    await bench.judge_turn(session, first, feedback_id=bench.feedback(first, -1.0))
    bench.execute("UPDATE samples SET state = 'claimed'")
    await bench.insert(second)
    bench.judge.hint = "Write it in Python, not in JavaScript."
    (result,) = await bench.judge_turn(session, second)
    assert result.why.startswith(
        "a step has its sample, so the old verdict is kept: verdict bad: rated -1.00 by the user"
    )
    assert bench.rows("SELECT state, reward FROM samples") == [{"state": "claimed", "reward": -1.0}]


async def test_a_late_comment_without_a_rating_is_evidence_for_new_votes(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    bench.judge.votes = [-1]
    given = bench.feedback(first, None, "It deleted my file.")
    (result,) = await bench.judge_turn(session, first, feedback_id=given)
    assert (result.verdict, result.why) == (-1, "verdict bad: 3 of 3 votes bad")
    assert "It deleted my file." in bench.judge.requests[-1]["messages"][-1]["content"]
    samples = bench.rows("SELECT state, reward FROM samples ORDER BY id")
    assert [(row["state"], row["reward"]) for row in samples] == [("superseded", 1.0), ("fresh", -1.0)]
    # Judging again is idempotent.
    assert await bench.judge_turn(session, first, feedback_id=given) == [result]
    assert len(bench.judge.requests) == 2


async def test_a_late_comment_that_no_judge_reads_changes_nothing_and_waits(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    given = bench.feedback(first, None, "It deleted my file.")
    (result,) = await bench.judge_turn(session, first, feedback_id=given, give_up="the judge answered 500")
    assert (result.outcome, result.verdict) == (TurnOutcome.SAMPLED, 1)
    assert result.why.startswith(
        "re-judging gave no verdict (no valid vote (the judge answered 500)); the old one is kept: "
    )
    assert bench.rows("SELECT state FROM samples") == [{"state": "fresh"}]
    assert bench.rows("SELECT applied_at FROM feedback") == [{"applied_at": None}]  # the sweep notifies of it again
    bench.judge.votes = [-1]
    (result,) = await bench.judge_turn(session, first, feedback_id=given)
    assert result.verdict == -1


async def test_feedback_after_a_step_took_the_sample_makes_a_new_one(bench: Bench) -> None:
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    bench.execute("UPDATE samples SET state = 'claimed'")
    await bench.judge_turn(session, first, feedback_id=bench.feedback(first, -1.0))
    states = bench.rows("SELECT state, reward FROM samples ORDER BY id")
    assert [(row["state"], row["reward"]) for row in states] == [("claimed", 1.0), ("fresh", -1.0)]
    assert [row["revision"] for row in bench.rows("SELECT revision FROM judgements ORDER BY revision")] == [0, 1]


async def test_a_neutral_rating_withdraws_a_fresh_sample(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    (result,) = await bench.judge_turn(session, first, feedback_id=bench.feedback(first, 0.0))
    assert result.outcome is TurnOutcome.UNDECIDED
    assert bench.rows("SELECT state FROM samples") == [{"state": "superseded"}]


async def test_an_erased_turn_is_left_alone(bench: Bench) -> None:
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    bench.execute("UPDATE turns SET outcome = 'erased', outcome_detail = 'on request' WHERE id = %s", first.turn_id)
    assert await bench.judge_turn(session, second) == []
    (result,) = await bench.judge_turn(session, first, feedback_id=bench.feedback(first, 1.0))
    assert result.outcome is TurnOutcome.ERASED
    assert bench.judge.requests == []
    assert bench.rows("SELECT * FROM judgements") == []


async def test_feedback_days_after_the_session_closed_and_its_sample_expired_makes_a_new_sample(bench: Bench) -> None:
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    await bench.close(session)
    bench.execute("UPDATE samples SET state = 'expired', reason = 'stale' WHERE turn_id = %s", first.turn_id)
    bench.execute("UPDATE turns SET outcome = 'expired', outcome_detail = 'stale' WHERE id = %s", first.turn_id)
    bench.execute(
        "UPDATE turns SET started_at = started_at - interval '9 days', entered_at = now() - interval '9 days'"
    )
    stored = await PostgresFeedbackStore(bench.database).give(bench.key, first.turn_id, -1.0, None)
    assert stored is not None
    assert stored.effect is FeedbackEffect.NEW_SAMPLE
    (result,) = await bench.judge_turn(session, first, feedback_id=stored.given.feedback_id)
    assert (result.verdict, result.outcome, result.sample) == (-1, TurnOutcome.SAMPLED, True)
    samples = bench.rows("SELECT state, reward FROM samples WHERE turn_id = %s ORDER BY id", first.turn_id)
    assert [(row["state"], row["reward"]) for row in samples] == [("expired", 1.0), ("fresh", -1.0)]
