"""Judging, closing and upkeep, in memory and in PostgreSQL alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import psycopg
import pytest

from activities.ports import ClosingStore, JudgementStore, UpkeepStore
from clawloop.contracts import Message, Outcome, SampleState, SessionEvidence, SessionSource, TurnKind, TurnRecord
from clawloop.errors import StoreUnavailable
from clawloop.ids import FeedbackId, SessionId, TurnId, new_turn_id
from clawloop.judging.hints import NOT_ASKED
from clawloop.judging.parsing import HintVote
from clawloop.judging.records import Ending, ExtraSample, Settlement
from clawloop.judging.voting import Verdict
from clawloop.recipe import Recipe
from db.closing import PostgresClosingStore
from db.engine import Database
from db.feedback import PostgresFeedbackStore
from db.judgements import PostgresJudgementStore
from db.recipes import ensure_recipe
from db.upkeep import PostgresUpkeepStore
from tests.contract.conftest import Stores
from tests.fakes.judgement_store import FakeJudgementStore
from tests.records import turn_record

RECIPE = Recipe(name="combined")
NOW, LATER = timedelta(0), timedelta(hours=1)
GOOD = Settlement(Verdict(1, 1.0, 1.0, "3 of 3"), NOT_ASKED, None, 1.0, None, Outcome.SAMPLED, "verdict +1")
BAD = Settlement(Verdict(-1, -1.0, -1.0, "3 of 3"), NOT_ASKED, None, -1.0, None, Outcome.SAMPLED, "verdict -1")
TIE = Settlement(Verdict(0, 0.0, 0.0, "vote tie"), NOT_ASKED, None, None, None, Outcome.UNDECIDED, "vote tie")


@dataclass
class Ledger:
    """
    Attributes:
        claim: takes a turn's fresh sample, as a step would.
        samples: states and rewards of a turn's samples, oldest first.
    """

    stores: Stores
    judgements: JudgementStore
    closing: ClosingStore
    upkeep: UpkeepStore
    give: Callable[[TurnId, float | None, str | None], Awaitable[FeedbackId]]
    claim: Callable[[TurnId], None]
    samples: Callable[[TurnId], list[tuple[SampleState, float | None]]]

    async def enter(self, *turns: TurnRecord) -> SessionId:
        sessions = [(await self.stores.turns.enter(turn)).session_id for turn in turns]
        return sessions[-1]

    def talk(self, *asked: str, session: str = "s") -> list[TurnRecord]:
        """Turns that follow each other."""
        messages: list[Message] = []
        turns = []
        for number, said in enumerate(asked):
            messages = [*messages, {"role": "user", "content": said}]
            answer: Message = {"role": "assistant", "content": f"answer {number} of {session}"}
            turns.append(
                turn_record(
                    api_key_id=self.stores.key,
                    evidence=SessionEvidence(SessionSource.HEADER, session),
                    messages=messages,
                    response=answer,
                )
            )
            messages = [*messages, answer]
        return turns

    async def fate(self, turn: TurnRecord) -> tuple[Outcome, str | None]:
        stored = await self.stores.turns.load(turn.turn_id)
        assert stored is not None
        return stored.outcome, stored.outcome_detail


@pytest.fixture
async def fake_ledger(fake_stores: Stores) -> Ledger:
    stores = fake_stores
    fake = FakeJudgementStore(stores.turns, RECIPE)  # type: ignore[arg-type]

    async def give(turn: TurnId, score: float | None, text: str | None) -> FeedbackId:
        return fake.give(stores.key, turn, score, text)

    return Ledger(stores, fake, fake, fake, give, fake.claim, fake.samples)


@pytest.fixture
async def postgres_ledger(postgres_stores: Stores, database: Database, postgres_url: str) -> Ledger:
    stores, url = postgres_stores, postgres_url
    await ensure_recipe(database, "default", RECIPE)

    async def give(turn: TurnId, score: float | None, text: str | None) -> FeedbackId:
        stored = await PostgresFeedbackStore(database).give(stores.key, turn, score, text)
        assert stored is not None
        return stored.given.feedback_id

    def claim(turn: TurnId) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("UPDATE samples SET state = 'claimed' WHERE state = 'fresh' AND turn_id = %s", [turn])

    def samples(turn: TurnId) -> list[tuple[SampleState, float | None]]:
        with psycopg.connect(url) as connection:
            query = "SELECT state, reward FROM samples WHERE turn_id = %s ORDER BY id"
            return [(SampleState(state), reward) for state, reward in connection.execute(query, [turn])]

    return Ledger(
        stores,
        PostgresJudgementStore(database),
        PostgresClosingStore(database),
        PostgresUpkeepStore(database),
        give,
        claim,
        samples,
    )


@pytest.fixture(params=["fake", pytest.param("postgres", marks=pytest.mark.postgres)])
def ledger(request: pytest.FixtureRequest) -> Ledger:
    both: Ledger = request.getfixturevalue(f"{request.param}_ledger")
    return both


async def test_a_turn_knows_its_place_over_side_turns(ledger: Ledger) -> None:
    first, second, third = ledger.talk("one", "two", "three")
    side = replace(
        second, turn_id=new_turn_id(), kind=TurnKind.SIDE, response={"role": "assistant", "content": "A title"}
    )
    await ledger.enter(first, side, third)
    await ledger.enter(second)
    placed = await ledger.judgements.place(second.turn_id)
    assert placed is not None
    assert (placed.number, placed.follows, placed.followed_by) == (2, first.turn_id, [third.turn_id])
    assert placed.overtaken_by == {third.turn_id}
    assert placed.held is None
    assert [candidate.turn_id for candidate in placed.candidates] == [first.turn_id]
    assert await ledger.judgements.place(side.turn_id) is None
    assert await ledger.judgements.place(new_turn_id()) is None


async def test_answers_are_kept_once_and_given_back(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.enter(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert (opened.votes, opened.hints, opened.recipe.name) == ({}, {}, "combined")
    await ledger.judgements.store_vote(opened.id, 0, "1", 1)
    await ledger.judgements.store_vote(opened.id, 0, "-1", -1)  # the first one counts
    await ledger.judgements.store_vote(opened.id, 2, "?", None)
    hint = HintVote(True, "In Python, please.")
    await ledger.judgements.store_hint(opened.id, "hint", 1, "x", hint)
    await ledger.judgements.store_hint(opened.id, "hint+1", 0, "y", HintVote(False, None))
    again = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    assert (again.id, again.votes, again.hints) == (opened.id, {0: 1, 2: None}, {1: hint})
    other = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint+1")
    assert list(other.hints) == [0]


async def test_settled_it_is_held_and_has_a_sample(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.enter(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.settle(opened.id, GOOD, [])
    placed = await ledger.judgements.place(first.turn_id)
    assert placed is not None
    assert placed.held is not None
    held = placed.held
    assert (held.revision, held.outcome, held.verdict, held.shown_by) == (0, Outcome.SAMPLED, 1, second.turn_id)
    assert await ledger.fate(first) == (Outcome.SAMPLED, "verdict +1")
    assert ledger.samples(first.turn_id) == [(SampleState.FRESH, 1.0)]


async def test_feedback_amends_a_fresh_judgement_and_adds_one_to_a_taken(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.enter(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.settle(opened.id, GOOD, [])
    given = await ledger.give(first.turn_id, -1.0, None)
    amended = await ledger.judgements.revise(first.turn_id, second.turn_id, b"f", "hint")
    assert amended.id == opened.id
    await ledger.judgements.settle(amended.id, TIE, [given])
    assert [one.applied for one in await ledger.judgements.feedback_of(first.turn_id)] == [True]
    assert [state for state, _ in ledger.samples(first.turn_id)] == [SampleState.SUPERSEDED]
    await ledger.judgements.settle(amended.id, GOOD, [given])
    ledger.claim(first.turn_id)
    heard = [given, await ledger.give(first.turn_id, -1.0, "no")]
    with pytest.raises(StoreUnavailable):
        await ledger.judgements.settle(opened.id, BAD, heard)  # a step took it meanwhile
    further = await ledger.judgements.revise(first.turn_id, None, b"g", "hint")
    assert further.id != opened.id
    await ledger.judgements.settle(further.id, BAD, heard)
    assert ledger.samples(first.turn_id) == [(SampleState.CLAIMED, 1.0), (SampleState.FRESH, -1.0)]


async def test_a_judge_that_answers_after_a_rating_does_not_undo_it(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.enter(first, second)
    slow = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    given = await ledger.give(first.turn_id, -1.0, None)
    quick = await ledger.judgements.revise(first.turn_id, second.turn_id, b"f", "hint")
    await ledger.judgements.settle(quick.id, BAD, [given])
    with pytest.raises(StoreUnavailable):
        await ledger.judgements.settle(slow.id, GOOD, [])
    assert ledger.samples(first.turn_id) == [(SampleState.FRESH, -1.0)]
    assert await ledger.fate(first) == (Outcome.SAMPLED, "verdict -1")


async def test_judged_again_it_replaces_what_no_step_has(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.enter(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.settle(opened.id, GOOD, [])
    again = await ledger.judgements.judge_again(first.turn_id, 1, second.turn_id, b"e", "hint")
    same = await ledger.judgements.judge_again(first.turn_id, 1, second.turn_id, b"e", "hint")
    assert again.id == same.id != opened.id
    await ledger.judgements.settle(again.id, BAD, [])
    assert ledger.samples(first.turn_id) == [(SampleState.SUPERSEDED, 1.0), (SampleState.FRESH, -1.0)]
    ledger.claim(first.turn_id)
    late = await ledger.judgements.judge_again(first.turn_id, 2, second.turn_id, b"e", "hint")
    await ledger.judgements.settle(late.id, GOOD, [])
    assert [state for state, _ in ledger.samples(first.turn_id)] == [SampleState.SUPERSEDED, SampleState.CLAIMED]
    assert await ledger.fate(first) == (Outcome.SAMPLED, "verdict -1")


async def test_a_closing_sees_all_turns_first_and_later_only_the_undecided(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    session = await ledger.enter(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.settle(opened.id, TIE, [])
    seen = await ledger.closing.look(session)
    assert seen is not None
    assert (seen.first, seen.at_least_one, seen.main_turns) == (True, True, 2)
    judged, last = seen.turns
    assert (judged.number, judged.judged, judged.expected, judged.trainable, judged.samples) == (1, True, 0.0, True, 0)
    assert (last.last, last.judged, last.outcome, last.followed_by) == (True, False, Outcome.WAITING, [])
    ending = Ending(second.turn_id, Outcome.NO_FEEDBACK, "nothing followed")
    extra = ExtraSample(first.turn_id, 0.5, "at least one")
    await ledger.closing.close(session, "idle", [ending, Ending(first.turn_id, Outcome.UNJUDGED, "x")], "done", extra)
    assert await ledger.fate(first) == (Outcome.SAMPLED, "at least one")
    assert await ledger.fate(second) == (Outcome.NO_FEEDBACK, "nothing followed")
    assert ledger.samples(first.turn_id) == [(SampleState.FRESH, 0.5)]
    seen = await ledger.closing.look(session)
    assert seen is not None
    assert (seen.first, seen.turns) == (False, [])
    assert await ledger.closing.look(SessionId(new_turn_id())) is None


async def test_a_turn_nobody_ended_keeps_its_session_open(ledger: Ledger) -> None:
    (first,) = ledger.talk("one")
    session = await ledger.enter(first)
    await ledger.closing.close(session, "idle", [], None, None)
    assert [facts.session_id for facts in await ledger.upkeep.sessions_left_open(NOW, 9)] == [session]
    seen = await ledger.closing.look(session)
    assert seen is not None
    assert [turn.turn_id for turn in seen.turns] == [first.turn_id]
    await ledger.closing.close(session, "idle", [Ending(first.turn_id, Outcome.NO_FEEDBACK, "no")], None, None)
    assert await ledger.upkeep.sessions_left_open(NOW, 9) == []


async def test_what_was_not_announced_is_found_in_order_until_it_is(ledger: Ledger) -> None:
    turns = ledger.talk("one", "two", "three")
    side = replace(turns[0], turn_id=new_turn_id(), kind=TurnKind.SIDE)
    await ledger.enter(turns[1], turns[0], side, turns[2])
    missed = await ledger.upkeep.unannounced_turns(NOW, 2)
    assert [told.turn_id for _, told in missed] == [turn.turn_id for turn in turns[:2]]
    assert await ledger.upkeep.unannounced_turns(LATER, 9) == []
    await ledger.upkeep.mark_announced([told.turn_id for _, told in missed])
    assert [told.turn_id for _, told in await ledger.upkeep.unannounced_turns(NOW, 9)] == [turns[2].turn_id]


async def test_feedback_nobody_was_told_of_is_found_until_somebody_is(ledger: Ledger) -> None:
    (first,) = ledger.talk("one")
    await ledger.enter(first)
    given = await ledger.give(first.turn_id, 1.0, None)
    ((facts, told),) = await ledger.upkeep.untold_feedback(NOW, 9)
    assert (facts.policy, told.feedback_id, told.turn_id) == ("default", given, first.turn_id)
    assert await ledger.upkeep.untold_feedback(LATER, 9) == []
    await ledger.upkeep.mark_feedback_announced([given])
    assert await ledger.upkeep.untold_feedback(NOW, 9) == []
