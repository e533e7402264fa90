"""When a gateway is not ready, and the reasons it gives."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry, Gauge

from clawloop.app.local.services.postgres import free_port
from clawloop.app.processes.gateway import GatewayReadiness
from clawloop.core.contracts.serving import Engine
from clawloop.serving.chat import ChatEngines
from clawloop.serving.rotation import Rotation
from db.database import BACKGROUND_LIMIT, Database

ENGINE = Engine("e0", "http://e0", {}, False)


@asynccontextmanager
async def _readiness(
    database_url: str, *, engine_healthy: bool, draining: bool = False, full: bool = False, engine: Engine = ENGINE
) -> AsyncIterator[GatewayReadiness]:
    def engines() -> Sequence[Engine]:
        return [engine]

    held = Gauge("held", "held", registry=CollectorRegistry())
    rotation = Rotation(engines, hold_seconds=1, hold_limit=1, held=held)
    rotation.mark(ENGINE.id, healthy=engine_healthy)
    database = Database(database_url, BACKGROUND_LIMIT)
    try:
        chat_engines = ChatEngines(rotation, engines)
        yield GatewayReadiness(database, chat_engines, engines, lambda: draining, lambda: full)
    finally:
        await database.close()


async def test_a_gateway_with_a_current_schema_and_a_healthy_engine_is_ready(postgres_url: str) -> None:
    async with _readiness(postgres_url, engine_healthy=True) as readiness:
        assert await readiness.problems() == []


async def test_a_draining_gateway_is_not_ready(postgres_url: str) -> None:
    async with _readiness(postgres_url, engine_healthy=True, draining=True) as readiness:
        assert await readiness.problems() == ["this gateway is being stopped"]


async def test_a_gateway_that_may_lose_turns_is_not_ready(postgres_url: str) -> None:
    async with _readiness(postgres_url, engine_healthy=True, full=True) as readiness:
        [problem] = await readiness.problems()
    assert "make room" in problem


async def test_an_outdated_schema_is_named_with_the_remedy(empty_postgres_url: str) -> None:
    async with _readiness(empty_postgres_url, engine_healthy=True) as readiness:
        [problem] = await readiness.problems()
    assert "schema" in problem
    assert "clawloop migrate" in problem


async def test_an_unhealthy_engine_is_named(postgres_url: str) -> None:
    async with _readiness(postgres_url, engine_healthy=False) as readiness:
        assert await readiness.problems() == ["no engine is healthy"]


async def test_a_database_that_is_away_is_named_without_user_and_address() -> None:
    port = free_port()
    url = f"postgresql://secret-user:secret-word@127.0.0.1:{port}/secret-name"
    async with _readiness(url, engine_healthy=False) as readiness:
        store, engine = await readiness.problems()
    assert store.startswith("PostgreSQL does not answer")
    assert not any(secret in store for secret in ("secret", "127.0.0.1", str(port)))
    assert engine == "no engine is healthy"


async def test_drained_engines_are_named_with_the_remedy(postgres_url: str) -> None:
    drained = replace(ENGINE, draining=True)
    async with _readiness(postgres_url, engine_healthy=True, engine=drained) as readiness:
        assert await readiness.problems() == ["every engine is drained: `clawloop engine drain --undo e0`"]
