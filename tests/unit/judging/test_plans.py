"""Judging as a whole: the plan of a turn, its activities, and judging again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from activities.judging.closing import CloseSession, ClosingActivities
from activities.judging.judge_turn import JudgeTurn, JudgingActivities
from activities.notify import TrainingNotifier
from activities.sweep import SweepActivities
from clawloop.core.contracts.sessions import SessionFacts, TurnResult
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnKind, TurnOutcome, TurnRecord
from clawloop.core.errors import JudgeUnavailable
from clawloop.core.ids import SessionId, new_feedback_id, new_turn_id
from clawloop.core.judging.plan import Action, JudgingPlan, RejudgeFacts, plan_judging, why_not_rejudged
from clawloop.core.judging.prompts import AnswerForm, JudgeAnswer, JudgePrompt
from clawloop.core.judging.records import CurrentJudgement, GivenFeedback
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import JudgeForm, Recipe
from tests.fakes.judgement_store import FakeJudgementStore
from tests.fakes.notifier import FakeNotifier, NoWork
from tests.fakes.sweep_store import FakeSweepStore
from tests.fakes.turn_store import FakeTurnStore
from tests.records import KEY, turn_record

# What judging does with a turn.

BY_STATE = CurrentJudgement(2, TurnOutcome.SAMPLED, 1, new_turn_id())
BY_FEEDBACK = CurrentJudgement(2, TurnOutcome.SAMPLED, 1, None)


def feedback(score: float | None, text: str | None = None, *, applied: bool = False) -> GivenFeedback:
    return GivenFeedback(new_feedback_id(), new_turn_id(), KEY, score, text, datetime.now(UTC), applied)


RATING, COMMENT = feedback(-1.0), feedback(None, "in Python, please")
OLD_RATING, OLD_COMMENT = feedback(-1.0, applied=True), feedback(None, "in Python, please", applied=True)
SKIP, WAIT = JudgingPlan(Action.SKIP), JudgingPlan(Action.WAIT)
OPEN, REVISE = JudgingPlan(Action.OPEN), JudgingPlan(Action.REVISE)


@pytest.mark.parametrize(
    ("has_next_state", "given", "by_outcome", "plan"),
    [
        (False, [], False, WAIT),
        (True, [], False, OPEN),
        (False, [], True, OPEN),
        (True, [], True, OPEN),
        (False, [RATING], False, REVISE),
        (True, [RATING], False, REVISE),
        (False, [COMMENT], False, REVISE),
        (True, [COMMENT], False, REVISE),
        (False, [OLD_RATING], False, OPEN),  # its judgement is not decided yet: continue it
    ],
)
def test_a_turn_without_a_decided_judgement(
    has_next_state: bool, given: list[GivenFeedback], by_outcome: bool, plan: JudgingPlan
) -> None:
    assert plan_judging(None, has_next_state=has_next_state, feedback=given, by_outcome=by_outcome) == plan


@pytest.mark.parametrize(
    ("current", "has_next_state", "given", "plan"),
    [
        # Nothing new: the message came twice.
        (BY_STATE, True, [], SKIP),
        (BY_STATE, True, [OLD_RATING, OLD_COMMENT], SKIP),
        (BY_STATE, False, [], SKIP),
        (BY_FEEDBACK, False, [OLD_RATING], SKIP),
        # A rating needs no judge, so it amends the judgement there is.
        (BY_STATE, True, [RATING], REVISE),
        (BY_STATE, True, [OLD_COMMENT, RATING], REVISE),
        (BY_STATE, True, [RATING, COMMENT], REVISE),
        (BY_STATE, True, [OLD_RATING, COMMENT], REVISE),
        # A comment, or a next state that came after the feedback, is new evidence for the judge.
        (BY_STATE, True, [COMMENT], JudgingPlan(Action.REJUDGE, 3)),
        (BY_STATE, True, [OLD_COMMENT, COMMENT], JudgingPlan(Action.REJUDGE, 3)),
        (BY_FEEDBACK, True, [OLD_RATING], JudgingPlan(Action.REJUDGE, 3)),
        (BY_FEEDBACK, True, [RATING], JudgingPlan(Action.REJUDGE, 3)),
        (BY_FEEDBACK, False, [COMMENT], JudgingPlan(Action.REJUDGE, 3)),
    ],
)
def test_a_turn_with_a_decided_judgement(
    current: CurrentJudgement, has_next_state: bool, given: list[GivenFeedback], plan: JudgingPlan
) -> None:
    assert plan_judging(current, has_next_state=has_next_state, feedback=given) == plan


def test_words_behind_tools_are_evidence_that_a_judgement_by_what_tools_printed_did_not_have() -> None:
    again = JudgingPlan(Action.REJUDGE, 3)
    assert plan_judging(BY_STATE, has_next_state=True, feedback=[], said_behind_tools=new_turn_id()) == again
    known = BY_STATE.next_turn_id
    assert plan_judging(BY_STATE, has_next_state=True, feedback=[], said_behind_tools=known) == SKIP


@pytest.mark.parametrize(
    ("current", "requested", "given", "has_next_state", "plan"),
    [
        (None, 1, [], True, JudgingPlan(Action.REJUDGE, 1)),
        (BY_STATE, 5, [], True, JudgingPlan(Action.REJUDGE, 5)),
        (BY_STATE, 3, [RATING], True, JudgingPlan(Action.REJUDGE, 3)),
        (BY_STATE, 2, [], True, SKIP),  # done already
        (BY_STATE, 1, [], True, SKIP),
        (BY_STATE, 2, [RATING], True, REVISE),
        (BY_STATE, 3, [], False, WAIT),  # what followed the reply was erased
        (None, 1, [], False, WAIT),
    ],
)
def test_a_revision_that_an_operator_asked_for(
    current: CurrentJudgement | None,
    requested: int,
    given: list[GivenFeedback],
    has_next_state: bool,
    plan: JudgingPlan,
) -> None:
    plan_ = plan_judging(current, has_next_state=has_next_state, feedback=given, requested_revision=requested)
    assert plan_ == plan


@pytest.mark.parametrize("current", [None, BY_STATE, BY_FEEDBACK])
def test_an_erased_turn_is_never_judged(current: CurrentJudgement | None) -> None:
    plan = plan_judging(current, has_next_state=True, feedback=[COMMENT], requested_revision=7, erased=True)
    assert plan == SKIP


# Judging, closing and sweeping on fakes that satisfy the stores' contract; nothing here leaves the process.

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

    async def votes_off(self, policy: str, wanted: JudgeForm) -> str | None:
        return None

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
    assert (desk.judge.asked, result.why) == ([3, 1, 1], "verdict good: 2 of 3 votes good")
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


# Which turns an operator may have judged again, and what the others say.

SESSION = SessionFacts(SessionId(UUID(int=1)), "default", "session_id", datetime.now(UTC), 0)
GOOD = RejudgeFacts(new_turn_id(), SESSION, TurnKind.MAIN, TurnOutcome.UNJUDGED, True, None, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"outcome": TurnOutcome.WAITING},
        {"outcome": TurnOutcome.UNDECIDED},
        {"outcome": TurnOutcome.NOT_TRAINABLE},
        {"outcome": TurnOutcome.SAMPLED, "sample": SampleState.FRESH},
        {"outcome": TurnOutcome.UNDECIDED, "sample": SampleState.SUPERSEDED},
        {"outcome": TurnOutcome.EXPIRED, "sample": SampleState.EXPIRED},
    ],
)
def test_a_turn_whose_sample_no_step_has_used_may_be_judged_again(changes: dict[str, Any]) -> None:
    assert why_not_rejudged(replace(GOOD, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": TurnKind.SIDE, "outcome": TurnOutcome.SIDE}, "side turn"),
        ({"outcome": TurnOutcome.ERASED}, "it was erased"),
        ({"outcome": TurnOutcome.NO_FEEDBACK}, "nothing to judge it by"),
        ({"outcome": TurnOutcome.NOT_TRAINABLE, "replied": False}, "no reply"),
        ({"outcome": TurnOutcome.WAITING, "has_follow_up": False}, "no message has followed it yet"),
        ({"outcome": TurnOutcome.SAMPLED, "sample": SampleState.CLAIMED}, "a training step is using its sample now"),
        (
            {"outcome": TurnOutcome.TRAINED, "sample": SampleState.TRAINED},
            "its sample is trained already: give feedback",
        ),
        ({"outcome": TurnOutcome.QUARANTINED, "sample": SampleState.QUARANTINED}, "its sample is quarantined already"),
    ],
)
def test_a_turn_that_may_not_be_judged_again_has_a_reason(changes: dict[str, Any], why: str) -> None:
    assert why in str(why_not_rejudged(replace(GOOD, **changes)))
