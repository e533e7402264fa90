"""The stores in memory and in PostgreSQL, for tests that run on both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest

from clawloop.core.contracts.serving import Directory, Policy, Scope
from clawloop.core.encryption.key_file import make_keys
from clawloop.core.encryption.sealer import Sealer
from clawloop.core.ids import ApiKeyId
from db.content import ContentCodec
from db.database import Database
from db.erasure import PostgresErasureStore
from db.judging.feedback import PostgresFeedbackStore
from db.serving.directory import DEFAULT_SAMPLING, PostgresDirectoryStore, ensure_policy
from db.serving.keys import PostgresKeyStore
from db.turns.files import PostgresFileStore
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
    files: FakeTurnStore | PostgresFileStore
    key: ApiKeyId
    other_key: ApiKeyId

    async def add_policy(self, name: str) -> None:
        if isinstance(self.turns, PostgresTurnStore):
            await ensure_policy(self.turns._database, name, "tiny", [])


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
        PostgresFileStore(database),
    )


@pytest.fixture
async def encrypted_stores(postgres_url: str, tmp_path: Path) -> AsyncIterator[Stores]:
    """As `postgres_stores`, with keys."""
    make_keys(tmp_path / "keys")
    opened = Database(postgres_url, TEST_LIMIT, ContentCodec(Sealer(tmp_path / "keys")))
    await ensure_policy(opened, "default", "tiny", ["qwen3-4b"])
    yield await _with_keys(
        PostgresTurnStore(opened),
        PostgresKeyStore(opened),
        PostgresDirectoryStore(opened),
        PostgresSessionStore(opened),
        PostgresFeedbackStore(opened),
        PostgresErasureStore(opened),
        PostgresFileStore(opened),
    )
    await opened.close()


@pytest.fixture
async def fake_stores() -> Stores:
    policy = Policy("default", "tiny", ("qwen3-4b",), 0, dict(DEFAULT_SAMPLING))
    turns = FakeTurnStore()
    sessions = FakeSessionStore(turns)
    directory = FakeDirectoryStore(Directory((policy,), ()))
    return await _with_keys(turns, FakeKeyStore(), directory, sessions, sessions, FakeErasureStore(turns), turns)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of stores runs on those in memory and in PostgreSQL; of turns and files also on encrypted ones."""
    if "stores" in metafunc.fixturenames:
        on_encrypted = metafunc.module.__name__.endswith(("test_turns", "test_files"))
        metafunc.parametrize("stores", ["fake", "postgres", *(["encrypted"] if on_encrypted else [])], indirect=True)


@pytest.fixture
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
    files: FakeTurnStore | PostgresFileStore,
) -> Stores:
    first, _ = await keys.create_key("default", {Scope.CHAT}, "first")
    second, _ = await keys.create_key("default", {Scope.CHAT}, "second")
    return Stores(turns, keys, directory, sessions, feedback, erasures, files, first.id, second.id)


@pytest.fixture
async def postgres_learning(postgres_url: str) -> AsyncIterator[PostgresLearning]:
    opened = Database(postgres_url, TEST_LIMIT)
    yield await PostgresLearning.on(postgres_url, opened)
    await opened.close()


@pytest.fixture
def fake_learning() -> FakeLearning:
    return FakeLearning()


@pytest.fixture(params=["fake", "postgres"])
def learning(request: pytest.FixtureRequest) -> Learning:
    """A policy with its stores, in memory and in PostgreSQL."""
    both: Learning = request.getfixturevalue(f"{request.param}_learning")
    return both
