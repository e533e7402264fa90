"""Judging, closing and sweep over one policy, in memory and in PostgreSQL alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import psycopg
import pytest

from activities.judging.closing import ClosingStore
from activities.judging.judge_turn import JudgementStore
from activities.sweep import SweepStore
from clawloop.core.contracts.sessions import FeedbackEffect
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnOutcome, TurnRecord
from clawloop.core.ids import FeedbackId, SessionId, TurnId
from clawloop.core.judging.hints import NOT_ASKED
from clawloop.core.judging.records import FinalizedJudgement, Relation
from clawloop.core.judging.voting import Verdict
from clawloop.core.recipes.recipe import Recipe
from db.database import Database
from db.judging.closing import PostgresClosingStore
from db.judging.feedback import PostgresFeedbackStore
from db.judging.judgements import PostgresJudgementStore
from db.sweep import PostgresSweepStore
from db.training.recipes import ensure_recipe, set_recipe
from tests.contract.conftest import Stores
from tests.fakes.judgement_store import FakeJudgementStore
from tests.fakes.sweep_store import FakeSweepStore
from tests.records import turn_record

RECIPE = Recipe(name="combined")
ROLLED_BACK = ", rolled back to 0"
GOOD = FinalizedJudgement(Verdict(1, 1.0, 1.0, "3 of 3"), NOT_ASKED, None, 1.0, (), TurnOutcome.SAMPLED, "verdict +1")
BAD = FinalizedJudgement(
    Verdict(-1, -1.0, -1.0, "3 of 3"), NOT_ASKED, None, -1.0, (), TurnOutcome.SAMPLED, "verdict -1"
)
TIE = FinalizedJudgement(Verdict(0, 0.0, 0.0, "vote tie"), NOT_ASKED, None, None, (), TurnOutcome.UNDECIDED, "vote tie")


@dataclass
class Ledger:
    """
    Attributes:
        claim: takes a turn's fresh sample, as a step would.
        train: learns from a turn's fresh sample in a step, as that would.
        erase: lets a turn be erased.
        samples: states and rewards of a turn's samples, oldest first.
        roll_back: lets the step that learned from a turn be rolled back.
        learn_by: gives the policy another recipe.
        give_outcome: says whether the task of a session of that name succeeded.
    """

    stores: Stores
    judgements: JudgementStore
    closing: ClosingStore
    sweep: SweepStore
    give: Callable[[TurnId, float | None, str | None], Awaitable[FeedbackId]]
    claim: Callable[[TurnId], None]
    train: Callable[[TurnId, int], None]
    roll_back: Callable[[TurnId], None]
    erase: Callable[[TurnId], None]
    samples: Callable[[TurnId], list[tuple[SampleState, float | None]]]
    learn_by: Callable[[Recipe], Awaitable[None]]
    give_outcome: Callable[[str, int], Awaitable[FeedbackEffect | None]]

    async def insert(self, *turns: TurnRecord) -> SessionId:
        sessions = [(await self.stores.turns.insert(turn)).session_id for turn in turns]
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

    async def samples_of(self, turn: TurnRecord) -> list[float]:
        """Rewards of its fresh samples."""
        fresh = [reward for state, reward in self.samples(turn.turn_id) if state is SampleState.FRESH]
        return [reward for reward in fresh if reward is not None]

    async def outcome_of(self, turn: TurnRecord) -> tuple[TurnOutcome, str | None]:
        stored = await self.stores.turns.load(turn.turn_id)
        assert stored is not None
        return stored.outcome, stored.outcome_detail


@pytest.fixture
async def fake_ledger(fake_stores: Stores) -> Ledger:
    stores = fake_stores
    fake = FakeJudgementStore(stores.turns, RECIPE)  # type: ignore[arg-type]

    async def give(turn: TurnId, score: float | None, text: str | None) -> FeedbackId:
        return fake.give(stores.key, turn, score, text)

    async def learn_by(recipe: Recipe) -> None:
        fake.recipe = recipe

    outcome = partial(fake.give_outcome, stores.key)
    sweep = FakeSweepStore(stores.turns, fake)  # type: ignore[arg-type]
    return Ledger(
        stores,
        fake,
        fake,
        sweep,
        give,
        fake.claim,
        fake.train,
        fake.roll_back,
        fake.erase,
        fake.samples,
        learn_by,
        outcome,
    )


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

    def erase(turn: TurnId) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("UPDATE turns SET outcome = 'erased' WHERE id = %s", [turn])

    def roll_back(turn: TurnId) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            became = "UPDATE turns SET outcome = 'rolled_back', outcome_detail = outcome_detail || %s WHERE id = %s"
            connection.execute(became, [ROLLED_BACK, turn])

    def samples(turn: TurnId) -> list[tuple[SampleState, float | None]]:
        with psycopg.connect(url) as connection:
            query = "SELECT state, reward FROM samples WHERE turn_id = %s ORDER BY id"
            return [(SampleState(state), reward) for state, reward in connection.execute(query, [turn])]

    async def learn_by(recipe: Recipe) -> None:
        await set_recipe(database, "default", recipe)

    return Ledger(
        stores,
        PostgresJudgementStore(database),
        PostgresClosingStore(database),
        PostgresSweepStore(database),
        give,
        claim,
        partial(train, url),
        roll_back,
        erase,
        samples,
        learn_by,
        partial(PostgresFeedbackStore(database).give_outcome, stores.key, "default"),
    )


@pytest.fixture(params=["fake", "postgres"])
def ledger(request: pytest.FixtureRequest) -> Ledger:
    both: Ledger = request.getfixturevalue(f"{request.param}_ledger")
    return both


def train(url: str, turn: TurnId, step: int) -> None:
    """A committed step learns from the turn's fresh sample; those beside it had the sample and were given up."""
    with psycopg.connect(url) as connection:
        for n, state in ((step - 1, "abandoned"), (step, "committed"), (step + 1, "abandoned")):
            connection.execute(
                """INSERT INTO steps (policy, n, parent, epoch, state, recipe_hash, finished_at)
                SELECT id, %s, 0, 0, %s, recipe_hash, now() FROM policies WHERE id = 'default'""",
                [n, state],
            )
            connection.execute(
                """INSERT INTO step_samples (policy, step, sample_id, place)
                SELECT policy, %s, id, 0 FROM samples WHERE turn_id = %s AND state = 'fresh'""",
                [n, turn],
            )
        connection.execute("UPDATE samples SET state = 'trained' WHERE turn_id = %s AND state = 'fresh'", [turn])
        became = "UPDATE turns SET outcome = 'trained', outcome_detail = %s WHERE id = %s"
        connection.execute(became, [f"trained in step {step}", turn])


def related(finalized: FinalizedJudgement, relation: Relation, reward: float | None) -> FinalizedJudgement:
    return replace(finalized, relation=relation, reward=reward)


async def finalize(ledger: Ledger, turn: TurnRecord, finalized: FinalizedJudgement) -> None:
    opened = await ledger.judgements.revise(turn.turn_id, None, b"e", "hint")
    await ledger.judgements.finalize(opened.id, finalized, [])
