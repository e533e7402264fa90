"""Judging, closing and sweeping on fakes that satisfy the stores' contract; nothing here leaves the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from activities.judging.closing import CloseSession, ClosingActivities
from activities.judging.judge_turn import JudgeTurn, JudgingActivities
from activities.notify import TrainingNotifier
from activities.sweep import SweepActivities
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnOutcome, TurnRecord
from clawloop.core.errors import JudgeUnavailable
from clawloop.core.ids import SessionId
from clawloop.core.judging.prompts import AnswerForm, JudgeAnswer, JudgePrompt
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import JudgeForm, Recipe
from tests.fakes.judgement_store import FakeJudgementStore
from tests.fakes.notifier import FakeNotifier, NoWork
from tests.fakes.sweep_store import FakeSweepStore
from tests.fakes.turn_store import FakeTurnStore
from tests.records import KEY, turn_record

BINARY = Recipe.model_validate(
    {
        "name": "binary",
        "signal": {"hints": False},
        "train": {"advantage": {"verdict_weight": 1.0, "teacher_weight": 0.0}},
    }
)


@dataclass
class ScriptedJudge:
    """Satisfies `activities.judging.vote_collector.Judge`, and renders; answers by grammar.

    Attributes:
        votes: its next answers; the last one for ever. An exception is raised.
        direct: the log-probs of its direct votes.
        asked: for how many answers, question by question.
    """

    votes: list[str | Exception] = field(default_factory=lambda: ["1"])
    asked: list[int] = field(default_factory=list)
    direct: dict[Vote, float] = field(default_factory=lambda: {1: -0.2, 0: -3.0, -1: -2.0})
    asked_directly: int = 0

    async def form(self, policy: str, wanted: JudgeForm) -> AnswerForm:
        return AnswerForm.GRAMMAR

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[JudgeAnswer]:
        self.asked.append(n)
        return [JudgeAnswer(self._next()) for _ in range(n)]

    async def distribution(self, policy: str, prompt: JudgePrompt) -> dict[Vote, float]:
        self.asked_directly += 1
        return self.direct

    def _next(self) -> str:
        vote = self.votes.pop(0) if len(self.votes) > 1 else self.votes[0]
        if isinstance(vote, Exception):
            raise vote
        return vote

    async def render(self, turn: TurnRecord, messages: Sequence[Message]) -> list[int]:
        return [1, 2, 3]


class Desk:
    """The judging activities over fakes."""

    def __init__(self) -> None:
        self.turns = FakeTurnStore()
        self.store = FakeJudgementStore(self.turns, BINARY)
        self.judge = ScriptedJudge()
        self.notifier = FakeNotifier()
        work = TrainingNotifier(NoWork(), FakeNotifier())
        self.judging = JudgingActivities(self.store, self.judge, self.judge.render, work)
        self.ledger = ClosingActivities(self.store, self.store, work)
        idle = timedelta(minutes=30)
        self.sweep = SweepActivities(FakeSweepStore(self.turns, self.store), self.notifier, work, idle, timedelta(0))

    async def talk(self, *asked: str) -> tuple[SessionId, list[TurnRecord]]:
        messages: list[Message] = []
        turns: list[TurnRecord] = []
        for number, text in enumerate(asked):
            messages = [*messages, {"role": "user", "content": text}]
            answer: Message = {"role": "assistant", "content": f"answer {number}"}
            evidence = SessionEvidence(SessionSource.HEADER, "s")
            turns.append(turn_record(api_key_id=KEY, evidence=evidence, messages=messages, response=answer))
            messages = [*messages, answer]
        session = [(await self.turns.insert(turn)).session_id for turn in turns][-1]
        return session, turns

    async def judge_turn(self, session: SessionId, turn: TurnRecord, revision: int | None = None) -> list[TurnResult]:
        ask = JudgeTurn(session_id=session, turn_id=turn.turn_id, revision=revision)
        return (await self.judging.judge_turn(ask)).results


@pytest.fixture
def desk() -> Desk:
    return Desk()


async def test_a_turn_is_judged_once_by_the_next_one(desk: Desk) -> None:
    session, (first, second) = await desk.talk("one", "two")
    assert await desk.judge_turn(session, first) == []
    once = await desk.judge_turn(session, second)
    assert [(result.turn_id, result.verdict, result.sample) for result in once] == [(first.turn_id, 1, True)]
    assert await desk.judge_turn(session, second) == once
    assert desk.judge.asked == [3]


async def test_a_judge_that_fails_midway_is_asked_only_for_the_missing_votes(desk: Desk) -> None:
    session, (first, second) = await desk.talk("one", "two")
    desk.judge.votes = ["1", "what?", "-1", JudgeUnavailable("away")]
    with pytest.raises(JudgeUnavailable):
        await desk.judge_turn(session, second)
    desk.judge.votes = ["1"]
    (result,) = await desk.judge_turn(session, second)
    assert (desk.judge.asked, result.why) == ([3, 1, 1], "verdict +1: 2 of 3 votes for 1")
    assert desk.store.samples(first.turn_id) == [(SampleState.FRESH, 1.0)]


async def test_rejudging_asks_for_new_votes_and_replaces_the_sample(desk: Desk) -> None:
    session, (first, second) = await desk.talk("one", "two")
    await desk.judge_turn(session, second)
    desk.judge.votes = ["-1"]
    (result,) = await desk.judge_turn(session, first, revision=1)
    assert (result.verdict, desk.judge.asked) == (-1, [3, 3])
    assert [state for state, _ in desk.store.samples(first.turn_id)] == [SampleState.SUPERSEDED, SampleState.FRESH]


async def test_the_next_judgement_reports_the_step_that_trained_a_turn(desk: Desk) -> None:
    session, (first, second, third) = await desk.talk("one", "two", "three")
    (result,) = await desk.judge_turn(session, second)
    assert (result.outcome, result.step) == (TurnOutcome.SAMPLED, None)
    desk.store.train(first.turn_id, 7)
    judged, trained = await desk.judge_turn(session, third)
    assert (judged.turn_id, judged.step) == (second.turn_id, None)
    assert (trained.turn_id, trained.number, trained.verdict, trained.step) == (first.turn_id, 1, 1, 7)
    assert (trained.outcome, trained.sample, trained.why) == (TurnOutcome.TRAINED, True, "trained in step 7")
    desk.store.roll_back(first.turn_id)
    _, back = await desk.judge_turn(session, third)
    assert (back.outcome, back.step, back.why) == (TurnOutcome.ROLLED_BACK, 7, "trained in step 7, rolled back to 0")
    desk.store.train(first.turn_id, 7)
    # A repeated judgement of the turn gives one row, with the step.
    again = await desk.judge_turn(session, second)
    assert [(result.turn_id, result.outcome, result.step) for result in again] == [
        (first.turn_id, TurnOutcome.TRAINED, 7)
    ]


async def test_a_closing_reports_the_steps_that_trained_turns(desk: Desk) -> None:
    session, (first, second) = await desk.talk("one", "two")
    await desk.judge_turn(session, second)
    desk.store.train(first.turn_id, 7)
    closed = await desk.ledger.close_session(CloseSession(session_id=session, why="idle for 30 min"))
    assert [(result.turn_id, result.step) for result in closed.results] == [(second.turn_id, None), (first.turn_id, 7)]


async def test_a_closing_returns_missed_turns_and_decides_the_rest(desk: Desk) -> None:
    session, (first, second) = await desk.talk("one", "two")
    ask = CloseSession(session_id=session, why="idle for 30 min")
    assert (await desk.ledger.close_session(ask)).to_judge == [first.turn_id]
    await desk.judge_turn(session, second)
    closed = await desk.ledger.close_session(ask)
    assert (closed.guarantee, [result.outcome for result in closed.results]) == (
        "has a sample",
        [TurnOutcome.NO_FEEDBACK],
    )


@pytest.mark.parametrize("erased", [False, True])
async def test_an_erased_turn_is_no_candidate_for_the_sample_a_session_gets(desk: Desk, erased: bool) -> None:
    session, (first, second) = await desk.talk("one", "two")
    desk.judge.votes = ["1", "-1", "0"]
    desk.judge.direct = {1: -0.1, 0: -3.0, -1: -3.0}
    await desk.judge_turn(session, second)
    if erased:
        desk.store.erase(first.turn_id)
    closed = await desk.ledger.close_session(CloseSession(session_id=session, why="idle for 30 min"))
    assert closed.to_ask == ([] if erased else [first.turn_id])
    assert closed.guarantee == ("no sample: no judged turn that can be trained" if erased else "")


async def test_a_sweep_notifies_of_missed_turns_once(desk: Desk) -> None:
    _, turns = await desk.talk("one", "two")
    assert (await desk.sweep.sweep()).turns == len(turns)
    assert (await desk.sweep.sweep()).turns == 0
    assert len(desk.notifier.sent) == len(turns)
