"""Judging a turn again because an operator asked, in PostgreSQL."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import TurnKind, TurnOutcome, TurnRecord
from clawloop.core.errors import JudgeUnavailable
from clawloop.core.ids import SessionId, new_turn_id
from clawloop.core.judging.plan import why_not_rejudged
from db.erasure import PostgresErasureStore
from db.judging.rejudging import PostgresRejudgeStore
from tests.judging.conftest import Bench

pytestmark = pytest.mark.usefixtures("binary_bench")


async def again(bench: Bench, session: SessionId, turn: TurnRecord, **ask: object) -> list[TurnResult]:
    """Judge the revision after the newest decided one, as the API asks for it."""
    so_far = await PostgresRejudgeStore(bench.database).rejudge_facts(turn.turn_id)
    assert so_far is not None
    assert why_not_rejudged(so_far) is None
    return await bench.judge_turn(session, turn, revision=so_far.next_revision, **ask)


async def judged(bench: Bench, *votes: int | str) -> tuple[SessionId, TurnRecord]:
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    bench.judge.votes = list(votes)
    await bench.judge_turn(session, second)
    return session, first


async def test_a_turn_whose_judge_was_away_is_judged_later(bench: Bench) -> None:
    bench.judge.mode = "401"
    session, first = await judged(bench, 1)
    assert (await bench.turn(first.turn_id)).outcome is TurnOutcome.UNJUDGED
    assert [turn.turn_id for turn in await PostgresRejudgeStore(bench.database).unjudged(10)] == [first.turn_id]
    bench.judge.mode = "well"
    (result,) = await again(bench, session, first)
    assert (result.outcome, result.why) == (TurnOutcome.SAMPLED, "verdict good: 3 of 3 votes good")
    assert await PostgresRejudgeStore(bench.database).unjudged(10) == []
    revisions = bench.rows("SELECT revision, outcome FROM judgements ORDER BY revision")
    assert [(row["revision"], row["outcome"]) for row in revisions] == [(0, "unjudged"), (1, "sampled")]


async def test_a_turn_without_a_judgement_when_its_session_closed_gets_revision_0(bench: Bench) -> None:
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.close(session, give_up=True)
    (result,) = await again(bench, session, first)
    assert result.sample
    assert bench.rows("SELECT revision FROM judgements") == [{"revision": 0}]


async def test_a_fresh_sample_is_replaced_and_the_old_votes_are_kept(bench: Bench) -> None:
    session, first = await judged(bench, 1)
    bench.judge.votes = [-1]
    (result,) = await again(bench, session, first)
    assert (result.verdict, result.outcome) == (-1, TurnOutcome.SAMPLED)
    samples = bench.rows("SELECT state, reward, reason FROM samples ORDER BY id")
    assert [(row["state"], row["reward"]) for row in samples] == [("superseded", 1.0), ("fresh", -1.0)]
    assert samples[0]["reason"] == "judged again: verdict bad: 3 of 3 votes bad"
    assert len(bench.rows("SELECT * FROM votes")) == 6


async def test_the_same_revision_twice_is_judged_once(bench: Bench) -> None:
    session, first = await judged(bench, 1)
    once = await bench.judge_turn(session, first, revision=1)
    asked = len(bench.judge.requests)
    assert await bench.judge_turn(session, first, revision=1) == once
    assert len(bench.judge.requests) == asked
    assert len(bench.rows("SELECT * FROM samples WHERE state = 'fresh'")) == 1


async def test_a_retry_asks_only_for_the_votes_this_revision_lacks(bench: Bench) -> None:
    session, first = await judged(bench, 1)
    judgement = await bench.judgements.open(first.turn_id, None, b"", "hint", revision=1)
    await bench.judgements.store_votes(judgement.id, [(0, "verdict: -1", -1)])
    bench.judge.votes = [-1]
    (result,) = await again(bench, session, first)
    assert result.why == "verdict bad: 3 of 3 votes bad"
    assert [request.get("n", 1) for request in bench.judge.requests] == [3, 2]


async def test_a_judge_that_does_not_answer_changes_nothing(bench: Bench) -> None:
    session, first = await judged(bench, 1)
    bench.judge.mode = "500"
    with pytest.raises(JudgeUnavailable):
        await again(bench, session, first)
    (result,) = await again(bench, session, first, give_up="the judge answered 500")
    assert result.why == (
        "re-judging gave no verdict (no valid vote (the judge answered 500)); the old one is kept: "
        "verdict good: 3 of 3 votes good"
    )
    assert bench.rows("SELECT state FROM samples") == [{"state": "fresh"}]
    assert (await bench.turn(first.turn_id)).outcome is TurnOutcome.SAMPLED


@pytest.mark.parametrize("state", ["claimed", "trained"])
async def test_a_sample_taken_meanwhile_stays_the_only_one(bench: Bench, state: str) -> None:
    session, first = await judged(bench, 1)
    bench.execute("UPDATE samples SET state = %s", state)
    bench.execute(
        "UPDATE turns SET outcome = 'trained', outcome_detail = 'trained in step 1' WHERE id = %s", first.turn_id
    )
    bench.judge.votes = [-1]
    (result,) = await bench.judge_turn(session, first, revision=1)  # asked for before the step took it
    assert (result.outcome, result.why) == (
        TurnOutcome.TRAINED,
        "a step has its sample, so the old verdict is kept: trained in step 1",
    )
    assert bench.rows("SELECT state, reward FROM samples") == [{"state": state, "reward": 1.0}]
    stored = await bench.turn(first.turn_id)
    assert (stored.outcome, stored.outcome_detail) == (TurnOutcome.TRAINED, "trained in step 1")
    # The judge's answers are stored all the same, and are not asked for again.
    asked = len(bench.judge.requests)
    await bench.judge_turn(session, first, revision=1)
    assert len(bench.judge.requests) == asked


async def test_a_turn_whose_sample_expired_may_get_another(bench: Bench) -> None:
    session, first = await judged(bench, 1)
    bench.execute("UPDATE samples SET state = 'expired', reason = 'recipe changed'")
    bench.execute(
        "UPDATE turns SET outcome = 'expired', outcome_detail = 'recipe changed' WHERE id = %s", first.turn_id
    )
    bench.judge.votes = [-1]
    (result,) = await again(bench, session, first)
    assert (result.verdict, result.outcome) == (-1, TurnOutcome.SAMPLED)
    samples = bench.rows("SELECT state, reward FROM samples ORDER BY id")
    assert [(row["state"], row["reward"]) for row in samples] == [("expired", 1.0), ("fresh", -1.0)]
    stored = await bench.turn(first.turn_id)
    assert (stored.outcome, stored.outcome_detail) == (TurnOutcome.SAMPLED, "verdict bad: 3 of 3 votes bad")


async def test_a_rating_stays_the_verdict(bench: Bench) -> None:
    session, first = await judged(bench, 1)
    await bench.judge_turn(session, first, feedback_id=bench.feedback(first, -1.0))
    (result,) = await again(bench, session, first)
    assert result.why == "verdict bad: rated -1.00 by the user"


async def test_erased_and_unknown_turns_are_left_alone(bench: Bench) -> None:
    session, first = await judged(bench, 1)
    bench.execute("UPDATE turns SET outcome = 'erased', outcome_detail = 'on request' WHERE id = %s", first.turn_id)
    (result,) = await bench.judge_turn(session, first, revision=1)
    assert (result.outcome, result.why) == (TurnOutcome.ERASED, "on request")
    so_far = await PostgresRejudgeStore(bench.database).rejudge_facts(first.turn_id)
    assert so_far is not None
    assert why_not_rejudged(so_far) == "it was erased"
    assert await PostgresRejudgeStore(bench.database).rejudge_facts(new_turn_id()) is None


async def test_a_sessions_main_turns_are_listed_in_their_order(bench: Bench) -> None:
    session, first = await judged(bench, 1)
    found = await PostgresRejudgeStore(bench.database).of_session(session)
    assert [(turn.outcome, turn.next_revision) for turn in found] == [
        (TurnOutcome.SAMPLED, 1),
        (TurnOutcome.WAITING, 0),
    ]
    assert found[0].turn_id == first.turn_id


async def test_a_turn_without_next_state_and_feedback_is_refused(bench: Bench) -> None:
    first, second = bench.conversation("one", "two")
    title = replace(second, kind=TurnKind.SIDE, turn_id=new_turn_id())
    await bench.insert(first)

    async def why() -> str | None:
        so_far = await PostgresRejudgeStore(bench.database).rejudge_facts(first.turn_id)
        assert so_far is not None
        return why_not_rejudged(so_far)

    nothing = "no message has followed it yet, and it has no feedback"
    assert await why() == nothing
    await bench.insert(title)  # a side turn is no next state
    assert await why() == nothing
    await bench.insert(second)
    assert await why() is None
    await PostgresErasureStore(bench.database).erase_turn(second.turn_id)
    assert await why() == nothing
    bench.feedback(first, -1.0)
    assert await why() is None
