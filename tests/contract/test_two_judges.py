"""Two workers judge one turn, in memory and in PostgreSQL: Temporal gave up the first one, and it goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from activities.judging.evaluation import Case, Evaluator
from activities.judging.judge_turn import JudgementStore
from activities.judging.vote_collector import VoteCollector
from clawloop.core.contracts.turns import Message, TurnRecord
from clawloop.core.errors import StoreUnavailable
from clawloop.core.judging.next_state_lookup import find_next_state
from clawloop.core.judging.prompts import AnswerForm, JudgeAnswer, JudgePrompt
from clawloop.core.judging.records import HINTS, FinalizedJudgement, OpenJudgement, StoredAnswers
from clawloop.core.judging.voting import HintVote, Vote
from clawloop.core.recipes.recipe import JudgeForm, Recipe
from tests.contract.ledgers import GOOD, Ledger, fake_ledger, ledger, postgres_ledger

__all__ = ["fake_ledger", "ledger", "postgres_ledger"]

NO_HINT = HintVote(False, None)


@dataclass
class ScriptedJudge:
    """Satisfies `activities.judging.vote_collector.Judge`; it renders, and answers by grammar.

    Attributes:
        vote: of each answer.
        asked: each request: for `vote`, `hint` or `direct`, and how many answers.
        meanwhile: what another worker does while a request of this kind is answered, once.
        unreadable: how many of the last answers of the next request of this kind cannot be read.
    """

    vote: Vote
    asked: list[tuple[str, int]] = field(default_factory=list)
    meanwhile: dict[str, Callable[[], Awaitable[object]]] = field(default_factory=dict)
    unreadable: dict[str, int] = field(default_factory=dict)

    async def votes_off(self, policy: str, wanted: JudgeForm) -> str | None:
        return None

    async def form(self, policy: str, wanted: JudgeForm) -> AnswerForm:
        return AnswerForm.GRAMMAR

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[JudgeAnswer]:
        kind = "vote" if "choice" in (prompt.structured_outputs or {}) else "hint"
        await self._is_asked(kind, n)
        answer = JudgeAnswer(str(self.vote) if kind == "vote" else f"no hint {prompt.mark}")
        unreadable = self.unreadable.pop(kind, 0)
        return [answer] * (n - unreadable) + [JudgeAnswer("?")] * unreadable

    async def distribution(self, policy: str, prompt: JudgePrompt) -> Mapping[Vote, float]:
        await self._is_asked("direct", 1)
        choices: tuple[Vote, ...] = (1, 0, -1)
        return {choice: -0.1 if choice == self.vote else -4.0 for choice in choices}

    async def render(self, turn: TurnRecord, messages: Sequence[Message]) -> list[int]:
        return [1, 2, 3]

    async def _is_asked(self, kind: str, n: int) -> None:
        self.asked.append((kind, n))
        if (meanwhile := self.meanwhile.pop(kind, None)) is not None:
            await meanwhile()


@dataclass
class JudgeWorker:
    """A worker that has opened a turn's judgement."""

    store: JudgementStore
    case: Case
    judgement: OpenJudgement
    judge: ScriptedJudge

    async def evaluate(self) -> FinalizedJudgement:
        case, judgement = self.case, self.judgement
        collector = VoteCollector(self.store, self.judge, case.record, case.evidence, judgement, case.give_up)
        return await Evaluator(case, judgement, collector, self.judge.render, None).evaluate()

    async def decide(self) -> None:
        await self.store.finalize(self.judgement.id, await self.evaluate(), [])


async def opened_by_two(ledger: Ledger) -> tuple[JudgeWorker, JudgeWorker]:
    """Workers that opened one judgement before either of them asked; the judge of the second one says −1."""
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    context = await ledger.judgements.load_context(first.turn_id)
    assert context is not None
    case = Case(context, await find_next_state(ledger.judgements.load_context, context))

    async def worker(vote: Vote) -> JudgeWorker:
        opened = await ledger.judgements.open(*case.key)
        return JudgeWorker(ledger.judgements, case, opened, ScriptedJudge(vote))

    return await worker(1), await worker(-1)


async def test_a_worker_stops_once_another_one_has_decided(ledger: Ledger) -> None:
    slow, quick = await opened_by_two(ledger)
    slow.judge.meanwhile["vote"] = quick.decide
    with pytest.raises(StoreUnavailable, match="was decided meanwhile"):
        await slow.evaluate()
    assert slow.judge.asked == [("vote", 3)]
    assert quick.judge.asked == [("vote", 3), ("hint", 3)]


async def test_a_worker_asks_for_no_hints_that_another_one_has_stored_and_decides_by_its_answers(
    ledger: Ledger,
) -> None:
    slow, quick = await opened_by_two(ledger)
    slow.judge.meanwhile["vote"] = quick.evaluate
    await slow.decide()
    assert slow.judge.asked == [("vote", 3)]
    context = await ledger.judgements.load_context(slow.case.record.turn_id)
    assert context is not None
    assert context.current is not None
    assert context.current.verdict == -1


async def test_a_worker_asks_for_what_another_one_has_not_stored(ledger: Ledger) -> None:
    slow, quick = await opened_by_two(ledger)

    async def dies_half_way() -> None:
        await ledger.judgements.store_hints(quick.judgement.id, HINTS, [(1, "no hint", NO_HINT)])

    slow.judge.meanwhile["vote"] = dies_half_way
    await slow.decide()
    assert slow.judge.asked == [("vote", 3), ("hint", 2)]


async def test_an_unreadable_answer_that_another_worker_has_is_not_asked_for_again(ledger: Ledger) -> None:
    slow, quick = await opened_by_two(ledger)

    async def has_one() -> None:
        await ledger.judgements.store_hints(quick.judgement.id, HINTS, [(2, "no hint", NO_HINT)])

    slow.judge.meanwhile["hint"], slow.judge.unreadable["hint"] = has_one, 2
    await slow.decide()
    assert slow.judge.asked == [("vote", 3), ("hint", 3), ("hint", 1)]


@pytest.mark.parametrize("kind", ["vote", "hint"])
async def test_where_no_answer_can_be_read_nothing_is_asked_again_that_the_worker_before_has_stored(
    ledger: Ledger, kind: str
) -> None:
    given_up, second = await opened_by_two(ledger)
    second.judge.meanwhile[kind], second.judge.unreadable[kind] = given_up.evaluate, 3
    await second.decide()
    assert second.judge.asked == ([("vote", 3)] if kind == "vote" else [("vote", 3), ("hint", 3)])


async def test_where_no_answer_can_be_read_a_worker_stops_if_the_one_before_has_decided(ledger: Ledger) -> None:
    given_up, second = await opened_by_two(ledger)
    second.judge.meanwhile["vote"], second.judge.unreadable["vote"] = given_up.decide, 3
    with pytest.raises(StoreUnavailable, match="was decided meanwhile"):
        await second.evaluate()
    assert second.judge.asked == [("vote", 3)]


@pytest.mark.parametrize("is_decided", [False, True])
async def test_after_a_direct_vote_too_nothing_is_asked_that_another_worker_has_stored(
    ledger: Ledger, is_decided: bool
) -> None:
    await ledger.learn_by(Recipe.model_validate({"name": "direct", "signal": {"votes": "direct"}}))
    slow, quick = await opened_by_two(ledger)
    slow.judge.meanwhile["direct"] = quick.decide if is_decided else quick.evaluate
    if is_decided:
        with pytest.raises(StoreUnavailable, match="was decided meanwhile"):
            await slow.evaluate()
    else:
        assert (await slow.evaluate()).verdict.verdict == -1
    assert slow.judge.asked == [("direct", 1)]
    assert quick.judge.asked == [("direct", 1), ("hint", 3)]


async def test_each_answer_returns_what_is_stored_by_then(ledger: Ledger) -> None:
    store, (first, second) = ledger.judgements, ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await store.open(first.turn_id, second.turn_id, b"e", HINTS)
    votes: dict[int, Vote | None] = {0: 1}
    assert await store.store_votes(opened.id, [(0, "1", 1)]) == StoredAnswers(votes)
    votes[1] = None
    assert await store.store_votes(opened.id, [(0, "-1", -1), (1, "?", None)]) == StoredAnswers(votes)
    hints = {(HINTS, 0): None, (HINTS, 1): HintVote(True, "In Python, please.")}
    given = [(index, "x", hint) for (_, index), hint in hints.items()]
    assert await store.store_hints(opened.id, HINTS, given) == StoredAnswers(votes, hints)
    hints["hint+1", 0] = NO_HINT
    assert await store.store_hints(opened.id, "hint+1", [(0, "y", NO_HINT)]) == StoredAnswers(votes, hints)
    said: dict[Vote, float] = {1: -0.25, 0: -9999.0, -1: -1.5}
    assert await store.store_direct_vote(opened.id, said, 1) == StoredAnswers(votes, hints, said)
    others: dict[Vote, float] = {1: -2.0, 0: -1.0, -1: -1.0}
    assert await store.store_direct_vote(opened.id, others, 0) == StoredAnswers(votes, hints, said)
    await store.finalize(opened.id, GOOD, [])
    late = await store.store_votes(opened.id, [(2, "1", 1)])
    assert (late.votes, late.decided_at is not None) == (votes, True)
    # Who amends it opens it as decided, and learns of a later decision alone.
    for reopen in (store.open, store.revise):
        known = await reopen(first.turn_id, second.turn_id, b"e", HINTS)
        assert (known.id, known.decided_at) == (opened.id, late.decided_at)
    await store.finalize(opened.id, GOOD, [])
    again = await store.store_hints(opened.id, HINTS, [(2, "z", NO_HINT)])
    assert again.decided_at is not None
    assert again.decided_at != late.decided_at


async def test_of_judgements_that_are_answered_at_once_each_gets_its_own(ledger: Ledger) -> None:
    store = ledger.judgements
    talks = [ledger.talk("one", "two", session=session) for session in ("a", "b", "c")]
    for talk in talks:
        await ledger.insert(*talk)
    opened = [await store.open(first.turn_id, second.turn_id, b"e", HINTS) for first, second in talks]
    votes: list[Vote | None] = [1, -1, None]
    stored = await asyncio.gather(
        *(store.store_votes(one.id, [(0, "", vote)]) for one, vote in zip(opened, votes, strict=True))
    )
    assert [one.votes for one in stored] == [{0: 1}, {0: -1}, {0: None}]
    hints = [HintVote(True, f"In the style of {number}.") for number in range(3)]
    stored = await asyncio.gather(
        *(store.store_hints(one.id, HINTS, [(0, "", hint)]) for one, hint in zip(opened, hints, strict=True))
    )
    assert [(one.votes, one.hints_of(HINTS)) for one in stored] == [
        ({0: vote}, {0: hint}) for vote, hint in zip(votes, hints, strict=True)
    ]
