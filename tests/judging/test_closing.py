"""Closing a session: every main turn gets an outcome and a reason, and the session a sample if it can have one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from activities.judging import closing
from activities.judging.judge_turn import CollectDirectVote
from clawloop.core.contracts.turns import Message, TurnKind, TurnOutcome, TurnRecord
from clawloop.core.ids import SessionId, new_turn_id
from tests.judging.conftest import Bench


async def outcomes(bench: Bench, *turns: TurnRecord) -> list[tuple[TurnOutcome, str | None]]:
    stored = [await bench.turn(turn.turn_id) for turn in turns]
    return [(turn.outcome, turn.outcome_detail) for turn in stored]


async def test_every_main_turn_of_a_closed_session_has_an_outcome_and_a_reason(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second, third = bench.conversation("one", "two", "three")
    (_, retried) = bench.conversation("one", "other")
    retried = replace(retried, response={"role": "assistant", "content": "never shown again"})
    title: Message = {"role": "assistant", "content": "A title"}
    side = replace(second, turn_id=new_turn_id(), kind=TurnKind.SIDE, kind_reason="title", response=title)
    broken = replace(third, turn_id=new_turn_id(), response=None, response_ids=None, logprobs=None, error="died")
    third = replace(third, turn_id=new_turn_id())  # the newest
    session = await bench.insert(first, side, second, retried, broken, third)
    await bench.judge_turn(session, second)
    await bench.judge_turn(session, broken)  # its engine died, but its request holds a next state

    closed = await bench.close(session)

    assert closed.to_judge == []
    why = "verdict good: 3 of 3 votes good"
    assert await outcomes(bench, first, second, retried, third, side, broken) == [
        (TurnOutcome.SAMPLED, why),
        (TurnOutcome.SAMPLED, why),
        (TurnOutcome.NO_FEEDBACK, "answer not in later history"),
        (TurnOutcome.NO_FEEDBACK, "nothing followed: idle for 30 min"),
        (TurnOutcome.SIDE, "title"),
        (TurnOutcome.NOT_TRAINABLE, "no reply: died"),
    ]
    (row,) = bench.rows("SELECT * FROM sessions")
    assert (row["state"], row["closed_why"], row["guarantee"]) == ("closed", "idle for 30 min", "has a sample")
    assert {result.number for result in closed.results} == {3, 5}


async def test_turns_that_can_still_be_judged_are_returned_first_and_then_given_up(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    closed = await bench.close(session)
    assert closed.to_judge == [first.turn_id]
    assert bench.rows("SELECT state FROM sessions") == [{"state": "open"}]
    await bench.close(session, give_up=True)
    assert (await outcomes(bench, first))[0] == (
        TurnOutcome.UNJUDGED,
        "could not be judged before the session closed",
    )


async def test_turns_that_cannot_be_judged_do_not_block_those_behind_them(
    binary_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = binary_bench
    monkeypatch.setattr(closing, "TO_JUDGE_LIMIT", 2)
    turns = bench.conversation(*"abcdef")
    ids = [turn.turn_id for turn in turns]
    session = await bench.insert(*turns)
    assert (await bench.close(session)).to_judge == ids[:2]
    assert (await bench.close(session, tried_up_to=ids[1])).to_judge == ids[2:4]
    assert (await bench.close(session, tried_up_to=ids[3])).to_judge == [ids[4], ids[0]]
    assert (await bench.close(session, tried_up_to=ids[4])).to_judge == ids[:2]  # all were tried: the workflow gives up


async def test_closing_a_closed_session_again_changes_neither_time_nor_reason(binary_bench: Bench) -> None:
    bench = binary_bench
    turns = bench.conversation("one", "two", "three")
    session = await bench.insert(*turns[:2])
    await bench.judge_turn(session, turns[1])
    assert (await bench.close(session, "it was closed before", again=True)).still_open
    assert bench.rows("SELECT state, closed_why FROM sessions") == [{"state": "open", "closed_why": None}]
    assert await outcomes(bench, turns[1]) == [(TurnOutcome.WAITING, None)]
    await bench.close(session, "the client ended the session")
    known = "SELECT state, closed_why, closed_at FROM sessions"
    before = bench.rows(known)
    given = bench.feedback(turns[0], -1.0)
    await bench.judge_turn(session, turns[0], feedback_id=given)
    assert not (await bench.close(session, "it was closed before", again=True)).still_open
    assert bench.rows(known) == before
    # The next turn opens the session again, and then another reason is stored.
    await bench.insert(turns[2])
    assert (await bench.close(session, "it was closed before", again=True)).still_open
    await bench.judge_turn(session, turns[2])
    await bench.close(session)
    (row,) = bench.rows(known)
    assert (row["state"], row["closed_why"]) == ("closed", "idle for 30 min")
    assert row["closed_at"] > before[0]["closed_at"]


async def test_a_turn_the_workflow_does_not_know_stays_open(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first, second)
    await bench.judge_turn(session, second)
    await bench.close(session, up_to=first.turn_id)
    assert await outcomes(bench, second) == [(TurnOutcome.WAITING, None)]
    assert bench.rows("SELECT state FROM sessions") == [{"state": "open"}]


async def test_a_session_without_a_sample_gets_the_turn_with_the_clearest_score(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second, third = bench.conversation("one", "two", "three")
    session = await bench.insert(first, second, third)
    bench.judge.votes = [1, 0, 0]
    await bench.judge_turn(session, second)  # 0, with a mean of +0.33
    bench.judge.votes = [-1, 0, 1]  # a tie: 0, with a mean of 0
    await bench.judge_turn(session, third)
    closed = await bench.close(session)
    assert closed.guarantee == "the only sample of its session: mean vote +0.33"
    (sample,) = bench.rows("SELECT turn_id, reward, reason FROM samples")
    assert (sample["turn_id"], sample["reason"]) == (first.turn_id, "the only sample of its session: mean vote +0.33")
    assert abs(sample["reward"] - 1 / 3) < 1e-9
    assert (await outcomes(bench, first))[0][0] is TurnOutcome.SAMPLED
    # Once per session, at its first close.
    bench.execute("UPDATE samples SET state = 'superseded'")
    assert (await bench.close(session)).guarantee == ""


async def test_a_session_in_which_nothing_was_judged_gets_a_reason_instead_of_a_sample(binary_bench: Bench) -> None:
    bench = binary_bench
    (only,) = bench.conversation("one")
    session = await bench.insert(only)
    assert (await bench.close(session)).guarantee == "no sample: no judged turn that can be trained"


async def tied_session(bench: Bench) -> tuple[SessionId, list[TurnRecord]]:
    """Two judged turns whose votes cancel out, and one that nothing followed."""
    turns = bench.conversation("one", "two", "three")
    session = await bench.insert(*turns)
    bench.judge.votes = [1, 0, -1, 1, 0, -1]
    for turn in turns[1:]:
        await bench.judge_turn(session, turn)
    return session, turns


async def test_where_votes_cancel_out_direct_votes_decide(grammar_bench: Bench) -> None:
    bench = grammar_bench
    session, (first, second, third) = await tied_session(bench)
    closed = await bench.close(session)
    assert (closed.to_ask, closed.results) == ([first.turn_id, second.turn_id], [])
    assert bench.rows("SELECT state FROM sessions") == [{"state": "open"}]
    for turn, logprobs in ((first, {"1": -1.2, "0": -1.0, "-": -1.1}), (second, {"1": -3.0, "0": -1.0, "-": -0.6})):
        bench.judge.direct = logprobs
        await bench.judging.collect_direct_vote(CollectDirectVote(session_id=session, turn_id=turn.turn_id))
        await bench.judging.collect_direct_vote(CollectDirectVote(session_id=session, turn_id=turn.turn_id))
    assert [body.get("top_logprobs") for body in bench.judge.requests].count(20) == 2
    assert "three" in bench.judge.requests[-1]["messages"][-1]["content"]

    closed = await bench.close(session, asked_directly=True)

    assert closed.guarantee == "the only sample of its session: mean vote -0.52"
    (sample,) = bench.rows("SELECT turn_id, reward FROM samples")
    assert (sample["turn_id"], round(sample["reward"], 2)) == (second.turn_id, -0.52)
    # The votes and their verdict do not change.
    assert [row["verdict"] for row in bench.rows("SELECT verdict FROM judgements")] == [0, 0]
    assert (await outcomes(bench, third))[0][0] is TurnOutcome.NO_FEEDBACK


async def test_a_direct_vote_without_a_lean_gives_no_sample(grammar_bench: Bench) -> None:
    bench = grammar_bench
    session, (first, _, _) = await tied_session(bench)
    bench.judge.direct = {"1": -1.0, "0": -1.0, "-": -1.01}
    await bench.judging.collect_direct_vote(CollectDirectVote(session_id=session, turn_id=first.turn_id))
    assert (await bench.close(session, asked_directly=True)).guarantee == "no sample: the largest mean vote is +0.00"
    assert bench.rows("SELECT * FROM samples") == []


async def test_without_direct_votes_the_reason_is_that_votes_cancel_out(binary_bench: Bench) -> None:
    bench = binary_bench  # its judge answers freely
    session, (first, _, _) = await tied_session(bench)
    await bench.judging.collect_direct_vote(CollectDirectVote(session_id=session, turn_id=first.turn_id))
    closed = await bench.close(session, asked_directly=True)
    assert closed.guarantee == "no sample: votes cancel out, and no direct vote was given"


async def test_a_turn_that_got_no_feedback_is_judged_when_its_session_goes_on(binary_bench: Bench) -> None:
    bench = binary_bench
    first, second = bench.conversation("one", "two")
    session = await bench.insert(first)
    await bench.close(session)
    await bench.insert(second)
    assert bench.rows("SELECT state FROM sessions") == [{"state": "open"}]
    (result,) = await bench.judge_turn(session, second)
    assert result.outcome is TurnOutcome.SAMPLED


async def test_closing_an_unknown_session_writes_nothing(bench: Bench) -> None:
    closed = await bench.close(SessionId(new_turn_id()))
    assert (closed.to_judge, closed.guarantee) == ([], "no such session")
