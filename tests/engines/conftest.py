"""An engine's activities on PostgreSQL and an engine in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from activities.serving.engines import EngineActivities, EngineLoad, EngineReport, EngineUnload, EngineWatch
from db.database import Database
from db.serving.directory import ensure_policy
from db.serving.engines import add_engine
from db.serving.publishing import PostgresPublishingStore
from tests.conftest import execute
from tests.fakes.engine_control import FakeEngineControl

ENGINE = "gpu:8100"


@dataclass
class Shelf:
    """One engine, its agent's activities, and their PostgreSQL."""

    url: str
    database: Database
    store: PostgresPublishingStore
    control: FakeEngineControl
    activities: EngineActivities
    tasks: set[asyncio.Task[object]] = field(default_factory=set)

    def commit(self, *numbers: int, policy: str = "default") -> None:
        """Insert versions as committed steps do."""
        for n in numbers:
            execute(
                self.url,
                "INSERT INTO versions (policy, n, parent, path, sha256) "
                f"VALUES ('{policy}', {n}, {n - 1}, '{policy}/v{n}-0123456789ab', '\\x{n:064x}')",
            )
            execute(self.url, f"UPDATE policies SET head = {n} WHERE id = '{policy}'")

    async def publish(self, n: int) -> None:
        """Commit a version, load it and activate it."""
        self.commit(n)
        await self.load()
        assert await self.store.activate("default", n, 0)

    def age(self, seconds: float) -> None:
        """Move what happened in the ledger into the past."""
        past = f"- interval '{seconds} seconds'"
        execute(self.url, f"UPDATE engine_versions SET loaded_at = loaded_at {past}")
        execute(self.url, f"UPDATE versions SET retired_at = retired_at {past}, created_at = created_at {past}")

    async def load(self) -> EngineReport:
        return await self.activities.load_versions(EngineLoad(engine_id=ENGINE))

    async def unload(self) -> EngineReport:
        return await self.activities.unload_versions(EngineUnload(engine_id=ENGINE))

    async def watch(self, seen: EngineReport | None = None) -> EngineReport:
        return await self.activities.watch_engine(EngineWatch(engine_id=ENGINE, seen=seen))

    def rows(self) -> list[str]:
        with psycopg.connect(self.url) as connection:
            found = connection.execute("SELECT policy, version FROM engine_versions ORDER BY 1, 2").fetchall()
        return [f"{policy}-v{n}" for policy, n in found]

    def one(self, query: str) -> Any:
        with psycopg.connect(self.url) as connection:
            row = connection.execute(query).fetchone()
        assert row is not None
        return row[0]


@pytest.fixture
async def shelf(postgres_url: str) -> AsyncIterator[Shelf]:
    database = Database(postgres_url, timedelta(seconds=20))
    await ensure_policy(database, "default", "tiny", [])
    await add_engine(database, f"http://{ENGINE}")
    store, control = PostgresPublishingStore(database), FakeEngineControl()
    activities = EngineActivities(store, control, check_seconds=0.02, routed_seconds=0.01)
    shelf = Shelf(postgres_url, database, store, control, activities)
    yield shelf
    await asyncio.gather(*shelf.tasks)
    await database.close()
