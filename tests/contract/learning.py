"""A policy with samples to claim, engines to publish to and a clock, in memory and in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import psycopg
from psycopg.rows import dict_row

from activities.serving.publishing import PublishingStore
from activities.training.gate import GateStore
from activities.training.steps import StepStore
from clawloop.core.contracts.serving import Engine, Scope
from clawloop.core.contracts.training import (
    CheckResult,
    GateCheck,
    SampleState,
    StepBatch,
    StepFigures,
    StepState,
    TrainedStep,
    VersionRef,
)
from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnOutcome
from clawloop.core.ids import ApiKeyId, FeedbackId, SampleId, new_feedback_id
from clawloop.core.judging.hints import HintChoice, PromptChange
from clawloop.core.judging.records import FinalizedJudgement
from clawloop.core.judging.voting import Verdict
from clawloop.core.recipes.recipe import Recipe
from clawloop.operations.training import TrainingStore
from db.database import Database
from db.judging.judgements import PostgresJudgementStore
from db.serving.directory import ensure_policy
from db.serving.engines import add_engine
from db.serving.keys import PostgresKeyStore
from db.serving.publishing import PostgresPublishingStore
from db.training.gate import PostgresGateStore
from db.training.operators import PostgresTrainingStore
from db.training.recipes import ensure_recipe
from db.training.steps import PostgresStepStore
from db.turns.insert import PostgresTurnStore
from tests.fakes.gate_store import FakeGateStore
from tests.fakes.ledger import FakeLedger
from tests.fakes.publishing_store import FakePublishingStore
from tests.fakes.step_store import FakeStepStore
from tests.fakes.trainer import metrics_of
from tests.fakes.training_store import FakeTrainingStore
from tests.records import turn_record

POLICY = "default"
HOURS = timedelta(hours=1)


def recipe(**train: object) -> Recipe:
    """Batches of four, two versions of staleness."""
    return Recipe.model_validate(
        {"name": "small", "train": {"batch_samples": 4, "staleness_versions": 2, "max_wait_hours": 24.0} | train}
    )


RECIPE = recipe()


def trained(
    step: StepBatch,
    *,
    sha256: str = "",
    dropped: dict[SampleId, str] | None = None,
    without_hint: dict[SampleId, str] | None = None,
    advantages: dict[SampleId, list[float | None]] | None = None,
    moves: dict[SampleId, list[float | None]] | None = None,
) -> TrainedStep:
    """The result of training a batch."""
    digest = sha256 or f"{step.n:064x}"
    parent = 0 if step.parent is None else step.parent.n
    path = f"{step.policy}/v{step.n}-{digest[:12]}"
    figures = StepFigures(
        loss=0.5,
        parts={"policy_gradient": 0.4, "kl": 0.1},
        grad_norm=1.5,
        ratio=1.01,
        kl=0.02,
        tokens=8,
        samples={sample.sample_id: metrics_of(sample) for sample in step.samples},
        dropped=dropped or {},
        without_hint=without_hint or {},
        advantages=advantages or {},
        moves=moves or {},
        moves_seconds=None if moves is None else 0.5,
        micro_batches=1,
        fillers=0,
    )
    return TrainedStep(VersionRef(step.policy, step.n, parent, path, digest), figures, seconds=2.5)


class Learning(Protocol):
    """A policy `default` with RECIPE, and what changes it."""

    @property
    def steps(self) -> StepStore: ...

    @property
    def gate(self) -> GateStore: ...

    @property
    def publishing(self) -> PublishingStore: ...

    @property
    def operators(self) -> TrainingStore: ...

    async def add_samples(
        self,
        count: int,
        *,
        version: int = 0,
        reward: float | None = 1.0,
        hinted: Sequence[int] | None = None,
        explicit: bool = False,
    ) -> list[SampleId]: ...

    async def set_recipe(self, new: Recipe) -> None: ...

    async def add_engine(self, url: str) -> str: ...

    async def drain(self, engine: str) -> None: ...

    async def age(self, by: timedelta) -> None:
        """Age everything."""

    async def lose_files(self, n: int) -> None:
        """Mark a version's files as removed, even if they are needed."""

    async def sample_result(self, sample: SampleId) -> tuple[SampleState, TurnOutcome, str]:
        """The sample's state, its turn's outcome and reason."""

    async def work_waiting(self) -> bool: ...


async def step(learning: Learning, n: int, *, count: int = 4) -> StepBatch:
    """One step from samples to commit; it starts where the policy's head is."""
    head = (await learning.steps.status(POLICY)).head
    await learning.add_samples(count, version=head)
    assert (await learning.steps.claim(POLICY, n)).state is StepState.CLAIMED
    batch = await learning.steps.batch(POLICY, n)
    assert await commit(learning, batch, trained(batch)) is StepState.COMMITTED
    return batch


async def commit(learning: Learning, batch: StepBatch, result: TrainedStep) -> StepState:
    """Make the result a candidate, and have the gate accept it."""
    state = await learning.steps.commit(batch, result)
    return (await learning.gate.accept(POLICY, batch.n))[0] if state is StepState.CANDIDATE else state


async def reject(learning: Learning, n: int, *, count: int = 4, reason: str = "too far") -> StepBatch:
    """One step from samples to a rejected version."""
    head = (await learning.steps.status(POLICY)).head
    await learning.add_samples(count, version=head)
    assert (await learning.steps.claim(POLICY, n)).state is StepState.CLAIMED
    batch = await learning.steps.batch(POLICY, n)
    failed = GateCheck("numbers", CheckResult.FAILED, reason, {"parent_distance": 4.5})
    assert await learning.steps.commit(batch, trained(batch), [failed]) is StepState.CANDIDATE
    assert await learning.gate.reject(POLICY, n, reason) == (StepState.REJECTED, f"rejected: {reason}")
    return batch


async def publish(learning: Learning, n: int, *engines: str) -> bool:
    """Load a version and let it answer."""
    for engine in engines:
        await learning.publishing.loaded(engine, POLICY, n)
    return await learning.publishing.activate(POLICY, n, (await learning.steps.status(POLICY)).epoch)


class FakeLearning:
    """In memory."""

    def __init__(self) -> None:
        self.ledger = FakeLedger()
        self.ledger.add_policy(POLICY, RECIPE)
        self.steps = FakeStepStore(self.ledger)
        self.gate = FakeGateStore(self.ledger)
        self.publishing = FakePublishingStore(self.ledger)
        self.operators = FakeTrainingStore(self.ledger)

    async def add_samples(
        self,
        count: int,
        *,
        version: int = 0,
        reward: float | None = 1.0,
        hinted: Sequence[int] | None = None,
        explicit: bool = False,
    ) -> list[SampleId]:
        return [
            self.ledger.add_sample(
                POLICY,
                version=version,
                reward=reward,
                hinted_prompts={} if hinted is None else {0: hinted},
                explicit=explicit,
            )
            for _ in range(count)
        ]

    async def set_recipe(self, new: Recipe) -> None:
        self.ledger.policies[POLICY].recipe = new

    async def add_engine(self, url: str) -> str:
        engine = url.removeprefix("http://")
        self.ledger.engines[engine] = Engine(engine, url, {}, draining=False)
        return engine

    async def drain(self, engine: str) -> None:
        self.ledger.engines[engine] = replace(self.ledger.engines[engine], draining=True)

    async def age(self, by: timedelta) -> None:
        self.ledger.now += by

    async def lose_files(self, n: int) -> None:
        self.ledger.versions[POLICY, n].removed = True

    async def sample_result(self, sample: SampleId) -> tuple[SampleState, TurnOutcome, str]:
        found = self.ledger.samples[sample]
        return found.state, found.outcome, found.why

    async def work_waiting(self) -> bool:
        return self.ledger.policies[POLICY].work_waiting


@dataclass
class PostgresLearning:
    """In PostgreSQL; samples are made by finalizing judgements of inserted turns.

    Attributes:
        woken: the policy with a new batch, as each finalization returned it.
    """

    url: str
    database: Database
    steps: PostgresStepStore
    gate: PostgresGateStore
    publishing: PostgresPublishingStore
    operators: PostgresTrainingStore
    turns: PostgresTurnStore
    judgements: PostgresJudgementStore
    key: ApiKeyId
    woken: list[str | None]

    @classmethod
    async def on(cls, url: str, database: Database) -> PostgresLearning:
        await ensure_policy(database, POLICY, "tiny", [])
        await ensure_recipe(database, POLICY, RECIPE)
        key, _ = await PostgresKeyStore(database).create_key(POLICY, frozenset({Scope.CHAT}), "test")
        return cls(
            url,
            database,
            PostgresStepStore(database),
            PostgresGateStore(database),
            PostgresPublishingStore(database),
            PostgresTrainingStore(database),
            PostgresTurnStore(database),
            PostgresJudgementStore(database),
            key.id,
            [],
        )

    async def add_samples(
        self,
        count: int,
        *,
        version: int = 0,
        reward: float | None = 1.0,
        hinted: Sequence[int] | None = None,
        explicit: bool = False,
        messages: list[Message] | None = None,
    ) -> list[SampleId]:
        return [await self._add_sample(version, reward, hinted, explicit, messages) for _ in range(count)]

    async def _add_sample(
        self,
        version: int,
        reward: float | None,
        hinted: Sequence[int] | None,
        explicit: bool,
        messages: list[Message] | None,
    ) -> SampleId:
        evidence = SessionEvidence(SessionSource.HEADER, f"s{len(self.woken)}")
        asked: list[Message] = messages or [{"role": "user", "content": f"{evidence.value}"}]
        turn = turn_record(messages=asked, api_key_id=self.key, version=version, evidence=evidence)
        await self.turns.insert(turn)
        applied: list[FeedbackId] = []
        if explicit:
            applied.append(new_feedback_id())
            insert = "INSERT INTO feedback (id, turn_id, api_key_id, score, effect) VALUES (%s, %s, %s, 1, 'amends')"
            await self.execute(insert, applied[0], turn.turn_id, self.key)
        opened = await self.judgements.open(turn.turn_id, None, b"evidence", "hint")
        finalized = FinalizedJudgement(
            verdict=Verdict(1, 1.0, reward, "3 of 3 votes"),
            hint=HintChoice((), answered=True, why="none"),
            not_trainable=None,
            reward=reward,
            hinted_prompts=() if hinted is None else (PromptChange(0, 0, tuple(hinted)),),
            outcome=TurnOutcome.SAMPLED,
            why="verdict +1",
        )
        self.woken.append(await self.judgements.finalize(opened.id, finalized, applied))
        (row,) = await self.rows("SELECT id FROM samples WHERE turn_id = %s", turn.turn_id)
        return SampleId(row["id"])

    async def set_recipe(self, new: Recipe) -> None:
        await ensure_recipe(self.database, POLICY, new)
        await self.execute("UPDATE policies SET recipe_hash = %s", new.hash)

    async def add_engine(self, url: str) -> str:
        return (await add_engine(self.database, url)).id

    async def drain(self, engine: str) -> None:
        await self.execute("UPDATE engines SET draining = true WHERE id = %s", engine)

    async def age(self, by: timedelta) -> None:
        await self.execute("UPDATE samples SET created_at = created_at - %s", by)
        await self.execute("UPDATE engine_versions SET loaded_at = loaded_at - %s", by)
        moved = "created_at = created_at - %s, retired_at = retired_at - %s"
        await self.execute(f"UPDATE versions SET {moved}", by, by)

    async def lose_files(self, n: int) -> None:
        await self.execute("UPDATE versions SET removed_at = now() WHERE n = %s", n)

    async def sample_result(self, sample: SampleId) -> tuple[SampleState, TurnOutcome, str]:
        query = """SELECT s.state, t.outcome, t.outcome_detail AS why
            FROM samples s JOIN turns t ON t.id = s.turn_id WHERE s.id = %s"""
        (row,) = await self.rows(query, sample)
        return SampleState(row["state"]), TurnOutcome(row["outcome"]), row["why"]

    async def work_waiting(self) -> bool:
        return bool((await self.rows("SELECT work_waiting FROM policies"))[0]["work_waiting"])

    async def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        def read() -> list[dict[str, Any]]:
            with psycopg.connect(self.url, row_factory=dict_row) as connection:
                return connection.execute(query, values).fetchall()

        return await asyncio.to_thread(read)

    async def execute(self, query: str, *values: object) -> None:
        def write() -> None:
            with psycopg.connect(self.url, autocommit=True) as connection:
                connection.execute(query, values)

        await asyncio.to_thread(write)
