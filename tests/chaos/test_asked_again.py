"""The checks of a run with faults notice a question for an answer that is stored, of every kind."""

from __future__ import annotations

import time
from dataclasses import replace
from uuid import uuid4

from activities.judging.judge_turn import CollectDirectVote
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.judging.records import DIRECT, HINTS, VOTES
from tests.chaos.asked_again import Answered, Stored, asked_again, stored_answers
from tests.chaos.judge_relay import JudgeRelay, Question
from tests.judging.conftest import JUDGE_SECONDS, Bench, bench, judge, with_client

__all__ = ["bench", "judge"]

WANTED = {VOTES: 3, HINTS: 3, DIRECT: 1}


async def test_votes_hints_and_a_direct_vote_are_known_by_the_turn_they_were_asked_about(bench: Bench) -> None:
    turns = bench.conversation("s4q1 please go on", "s4q2 please go on")
    session = await bench.insert(*turns)
    assert stored_answers(bench.url) == {}
    bench.judge.votes = [1, -1, 0]  # they cancel out, so the closing session asks for a direct vote
    relay = JudgeRelay(bench.judge.url, "tiny")
    async with relay, with_client(bench, AnswerForm.GRAMMAR, JUDGE_SECONDS, url=relay.url) as asking:
        await asking.judge_turn(session, turns[1])
        assert {key[0]: len(times) for key, times in stored_answers(bench.url).items()} == {VOTES: 3, HINTS: 3}
        await asking.judging.collect_direct_vote(CollectDirectVote(session_id=session, turn_id=turns[0].turn_id))
    stored = stored_answers(bench.url)
    assert {key[0]: len(times) for key, times in stored.items()} == WANTED
    assert {(asked.kind, asked.session, asked.mark) for asked in relay.questions} == stored.keys()
    assert asked_again(relay.questions, stored, WANTED) == []
    for question in relay.questions:
        again = replace(question, answers=1, asked_at=time.time() + 6)
        (found,) = asked_again([again], stored, WANTED)
        asked_for = WANTED[again.kind]
        assert found.startswith(f"{again} was asked though {asked_for} of {asked_for} answers were stored, at [-")
        assert asked_again([replace(again, session=5)], stored, WANTED) == []


def test_a_question_for_what_was_missing_when_it_was_asked_is_none() -> None:
    one, other = uuid4(), uuid4()
    first = [Stored(one, at) for at in (100.0, 100.0, 107.0)]
    stored: Answered = {(VOTES, 4, "0a1b2c"): first}
    assert asked_again([Question(VOTES, 4, "0a1b2c", answers=3, asked_at=99.0)], stored, WANTED) == []
    assert asked_again([Question(VOTES, 4, "0a1b2c", answers=3, asked_at=104.0)], stored, WANTED) == []
    assert asked_again([Question(VOTES, 4, "0a1b2c", answers=1, asked_at=106.0)], stored, WANTED) == []
    assert len(asked_again([Question(VOTES, 4, "0a1b2c", answers=2, asked_at=106.0)], stored, WANTED)) == 1
    assert asked_again([Question(HINTS, 4, "0a1b2c", answers=3, asked_at=109.0)], stored, WANTED) == []
    # Judged again: the votes of a further judgement are questions of its own.
    stored = {(VOTES, 4, "0a1b2c"): first + [Stored(other, 120.0)] * 3}
    assert asked_again([Question(VOTES, 4, "0a1b2c", answers=3, asked_at=119.0)], stored, WANTED) == []
    assert len(asked_again([Question(VOTES, 4, "0a1b2c", answers=3, asked_at=126.0)], stored, WANTED)) == 1
