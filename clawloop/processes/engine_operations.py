"""Operators' operations on engines, put together for the gateway and the command line alike."""

from __future__ import annotations

import aiohttp

from clawloop.contracts.serving import Engine
from clawloop.operations.engines import EngineOperations
from clawloop.processes.endpoints import engine_secret
from clawloop.processes.engine_check import check_engines
from clawloop.serving import engine_check
from clawloop.settings import Settings
from db.database import Database
from db.serving import engines

# A person waits; an engine that computes answers this within milliseconds.
_HEALTH_SECONDS = 3.0


class PostgresEngineStore:
    """Satisfies `clawloop.operations.engines.EngineStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def engines(self) -> list[Engine]:
        return await engines.list_engines(self._database)

    async def add(self, url: str) -> Engine:
        return await engines.add_engine(self._database, url)

    async def set_draining(self, engine_id: str, draining: bool) -> None:
        await engines.drain_engine(self._database, engine_id, draining)

    async def remove(self, engine_id: str) -> None:
        await engines.remove_engine(self._database, engine_id)


class HttpEngineProbe:
    """Satisfies `clawloop.operations.engines.EngineProbe`."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def healthy(self, engine: Engine) -> bool:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                async with session.get(f"{engine.url}/health") as answer:
                    return answer.status == 200
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False

    async def check(self, url: str) -> list[str]:
        address = engines.engine_of(url)[1]
        secret = engine_secret(self._settings)()
        return await check_engines(self._database, [address], self._settings.model, secret)

    async def answers_strangers(self, url: str) -> bool:
        return await engine_check.answers_strangers(engines.engine_of(url)[1])


def engine_operations_on(database: Database, settings: Settings) -> EngineOperations:
    return EngineOperations(PostgresEngineStore(database), HttpEngineProbe(database, settings))
