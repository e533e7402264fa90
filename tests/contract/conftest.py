"""The stores in memory and in PostgreSQL, for tests that run on both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

import pytest

from clawloop.contracts.serving import Directory, Policy, Scope
from clawloop.ids import ApiKeyId
from db.database import Database
from db.erasure import PostgresErasureStore
from db.judging.feedback import PostgresFeedbackStore
from db.serving.directory import DEFAULT_SAMPLING, PostgresDirectoryStore, ensure_policy
from db.serving.keys import PostgresKeyStore
from db.turns.insert import PostgresTurnStore
from db.turns.sessions import PostgresSessionStore
from tests.contract.learning import FakeLearning, Learning, PostgresLearning
from tests.fakes.directory_store import FakeDirectoryStore
from tests.fakes.erasure_store import FakeErasureStore
from tests.fakes.key_store import FakeKeyStore
from tests.fakes.session_store import FakeSessionStore
from tests.fakes.turn_store import FakeTurnStore

TEST_LIMIT = timedelta(seconds=20)  # a busy machine must not fail a test


@dataclass
class Stores:
    """
    Attributes:
        key, other_key: two keys of policy `default`.
    """

    turns: FakeTurnStore | PostgresTurnStore
    keys: FakeKeyStore | PostgresKeyStore
    directory: FakeDirectoryStore | PostgresDirectoryStore
    sessions: FakeSessionStore | PostgresSessionStore
    feedback: FakeSessionStore | PostgresFeedbackStore
    erasures: FakeErasureStore | PostgresErasureStore
    key: ApiKeyId
    other_key: ApiKeyId


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[Database]:
    """PostgreSQL with the policy `default`."""
    opened = Database(postgres_url, TEST_LIMIT)
    await ensure_policy(opened, "default", "tiny", ["qwen3-4b"])
    yield opened
    await opened.close()


@pytest.fixture
async def postgres_stores(database: Database) -> Stores:
    return await _with_keys(
        PostgresTurnStore(database),
        PostgresKeyStore(database),
        PostgresDirectoryStore(database),
        PostgresSessionStore(database),
        PostgresFeedbackStore(database),
        PostgresErasureStore(database),
    )


@pytest.fixture
async def fake_stores() -> Stores:
    policy = Policy("default", "tiny", ("qwen3-4b",), 0, dict(DEFAULT_SAMPLING))
    turns = FakeTurnStore()
    sessions = FakeSessionStore(turns)
    directory = FakeDirectoryStore(Directory((policy,), ()))
    return await _with_keys(turns, FakeKeyStore(), directory, sessions, sessions, FakeErasureStore(turns))


@pytest.fixture(params=["fake", pytest.param("postgres", marks=pytest.mark.postgres)])
def stores(request: pytest.FixtureRequest) -> Stores:
    both: Stores = request.getfixturevalue(f"{request.param}_stores")
    return both


async def _with_keys(
    turns: FakeTurnStore | PostgresTurnStore,
    keys: FakeKeyStore | PostgresKeyStore,
    directory: FakeDirectoryStore | PostgresDirectoryStore,
    sessions: FakeSessionStore | PostgresSessionStore,
    feedback: FakeSessionStore | PostgresFeedbackStore,
    erasures: FakeErasureStore | PostgresErasureStore,
) -> Stores:
    first, _ = await keys.create_key("default", {Scope.CHAT}, "first")
    second, _ = await keys.create_key("default", {Scope.CHAT}, "second")
    return Stores(turns, keys, directory, sessions, feedback, erasures, first.id, second.id)


@pytest.fixture
async def postgres_learning(postgres_url: str) -> AsyncIterator[PostgresLearning]:
    opened = Database(postgres_url, TEST_LIMIT)
    yield await PostgresLearning.on(postgres_url, opened)
    await opened.close()


@pytest.fixture
def fake_learning() -> FakeLearning:
    return FakeLearning()


@pytest.fixture(params=["fake", pytest.param("postgres", marks=pytest.mark.postgres)])
def learning(request: pytest.FixtureRequest) -> Learning:
    """A policy with its stores, in memory and in PostgreSQL."""
    both: Learning = request.getfixturevalue(f"{request.param}_learning")
    return both
