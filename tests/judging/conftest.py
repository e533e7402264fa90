"""Judging on real PostgreSQL with a scripted judge over HTTP; no Temporal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from activities.judging.closing import Closed, CloseSession, ClosingActivities
from activities.judging.judge_turn import JudgeTurn, JudgingActivities
from activities.notify import TrainingNotifier
from clawloop.core.contracts.serving import Scope
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, StoredTurn, TurnRecord
from clawloop.core.ids import ApiKeyId, FeedbackId, SessionId, TurnId, new_feedback_id
from clawloop.core.judging.prompts import AnswerForm
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.telemetry.metrics import WorkerMetrics
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient, ReadPictures, ReadTrial
from clawloop.serving.rendering import EngineRenderer
from db.database import Database
from db.judging.closing import PostgresClosingStore
from db.judging.judgements import PostgresJudgementStore
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.training.recipes import ensure_recipe
from db.training.work_flag import PostgresWorkStore
from db.turns.insert import PostgresTurnStore
from tests.contract.conftest import TEST_LIMIT
from tests.fakes.judge import FakeJudge, fake_judge
from tests.fakes.notifier import FakeNotifier
from tests.records import turn_record

JUDGE_SECONDS = 30.0  # on a busy machine a judge must not seem to hang

BINARY = Recipe.model_validate(
    {
        "name": "binary",
        "signal": {"hints": False},
        "train": {"advantage": {"verdict_weight": 1.0, "teacher_weight": 0.0}},
    }
)


@dataclass
class Bench:
    """A database with one key, and the activities that judge.

    Attributes:
        judge: answers over HTTP.
        notifier: the notifications of the training workflow.
        metrics: of all activities.
    """

    url: str
    database: Database
    turns: PostgresTurnStore
    judgements: PostgresJudgementStore
    judge: FakeJudge
    judging: JudgingActivities
    ledger: ClosingActivities
    work: TrainingNotifier
    notifier: FakeNotifier
    key: ApiKeyId
    metrics: WorkerMetrics

    def counted(self, name: str, **labels: str) -> float:
        """A counter's value, or how many a histogram has seen."""
        return self.metrics.registry.get_sample_value(f"clawloop_worker_{name}", labels) or 0.0

    async def insert(self, *records: TurnRecord) -> SessionId:
        session = None
        for record in records:
            session = (await self.turns.insert(record)).session_id
        assert session is not None
        return session

    async def judge_turn(self, session: SessionId, record: TurnRecord, **ask: Any) -> list[TurnResult]:
        return (await self.judging.judge_turn(JudgeTurn(session_id=session, turn_id=record.turn_id, **ask))).results

    async def close(self, session: SessionId, why: str = "idle for 30 min", **ask: Any) -> Closed:
        return await self.ledger.close_session(CloseSession(session_id=session, why=why, **ask))

    async def turn(self, turn_id: TurnId) -> StoredTurn:
        stored = await self.turns.load(turn_id)
        assert stored is not None
        return stored

    def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        with psycopg.connect(self.url, row_factory=dict_row) as connection:
            return connection.execute(query, values).fetchall()

    def execute(self, query: str, *values: object) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(query, values)

    def conversation(self, *asked: str | list[Message], session: str = "s", **fields: Any) -> list[TurnRecord]:
        """Turns that follow each other; each request repeats the one before, and adds the next of `asked`."""
        evidence = SessionEvidence(SessionSource.HEADER, session)
        messages: list[Message] = []
        turns: list[TurnRecord] = []
        for number, text in enumerate(asked):
            added: Sequence[Message] = [{"role": "user", "content": text}] if isinstance(text, str) else text
            messages = [*messages, *added]
            answer: Message = {"role": "assistant", "content": f"answer {number} of {session}"}
            turns.append(
                turn_record(api_key_id=self.key, evidence=evidence, messages=messages, response=answer, **fields)
            )
            messages = [*messages, answer]
        return turns

    def feedback(self, record: TurnRecord, score: float | None, text: str | None = None) -> FeedbackId:
        given = new_feedback_id()
        self.execute(
            "INSERT INTO feedback (id, turn_id, api_key_id, score, text, effect) VALUES (%s, %s, %s, %s, %s, 'amends')",
            given,
            record.turn_id,
            self.key,
            score,
            text,
        )
        return given


@pytest.fixture
async def judge() -> AsyncIterator[FakeJudge]:
    async with fake_judge() as running:
        yield running


@pytest.fixture
async def bench(postgres_url: str, judge: FakeJudge) -> AsyncIterator[Bench]:
    """The policy `default` learns by verdicts and hints (recipe `combined`)."""
    database = Database(postgres_url, TEST_LIMIT)
    await ensure_policy(database, "default", "tiny", [])
    await ensure_recipe(database, "default", Recipe(name="combined"))
    key, _ = await PostgresKeyStore(database).create_key("default", frozenset({Scope.CHAT}), "test")
    judgements = PostgresJudgementStore(database)

    def endpoints(policy: str) -> list[Endpoint]:
        return [Endpoint(judge.url, "tiny")]

    metrics = WorkerMetrics()
    async with (
        JudgeClient(endpoints, AnswerForm.FREE, seconds=JUDGE_SECONDS, clock=metrics) as client,
        EngineRenderer(endpoints) as renderer,
    ):
        notifier = FakeNotifier()
        work = TrainingNotifier(PostgresWorkStore(database), notifier)
        yield Bench(
            url=postgres_url,
            database=database,
            turns=PostgresTurnStore(database),
            judgements=judgements,
            judge=judge,
            judging=JudgingActivities(judgements, client, renderer.render, work, metrics),
            ledger=ClosingActivities(PostgresClosingStore(database), judgements, work, metrics),
            work=work,
            notifier=notifier,
            key=key.id,
            metrics=metrics,
        )
    await database.close()


def with_signal(**signal: object) -> Recipe:
    """BINARY with another signal; at least one is off, so that only the tested rule gives samples."""
    known = BINARY.model_dump(mode="json")
    return Recipe.model_validate(known | {"signal": known["signal"] | {"at_least_one": False} | signal})


async def set_recipe(bench: Bench, recipe: Recipe) -> None:
    await ensure_recipe(bench.database, "default", recipe)
    bench.execute("UPDATE policies SET recipe_hash = %s", recipe.hash)


@pytest.fixture
async def grammar_bench(bench: Bench) -> AsyncIterator[Bench]:
    """The policy learns by verdicts alone, and its judge answers by grammar."""
    await set_recipe(bench, BINARY)
    async with with_client(bench, AnswerForm.GRAMMAR, JUDGE_SECONDS) as asking:
        yield asking


@pytest.fixture
async def hurried_bench(binary_bench: Bench) -> AsyncIterator[Bench]:
    """The policy learns by verdicts alone, and a judge has one second."""
    async with with_client(binary_bench, AnswerForm.FREE, 1) as asking:
        yield asking


@asynccontextmanager
async def with_client(
    bench: Bench,
    form: AnswerForm | None,
    seconds: float,
    pictures: ReadPictures | None = None,
    url: str | None = None,
    trials: ReadTrial | None = None,
) -> AsyncIterator[Bench]:
    """
    Args:
        url: of what hands questions on to the judge; None: they go to the judge itself.
    """

    def endpoints(policy: str) -> list[Endpoint]:
        return [Endpoint(url or bench.judge.url, "tiny")]

    async with (
        JudgeClient(endpoints, form, seconds=seconds, clock=bench.metrics, pictures=pictures, trials=trials) as client,
        EngineRenderer(endpoints) as renderer,
    ):
        judging = JudgingActivities(bench.judgements, client, renderer.render, bench.work, bench.metrics)
        yield replace(bench, judging=judging)


@pytest.fixture
async def binary_bench(bench: Bench) -> Bench:
    """The policy learns by verdicts alone."""
    await set_recipe(bench, BINARY)
    return bench
