"""Engines and the ledger's check for operators, in memory."""

from __future__ import annotations

from dataclasses import replace

from clawloop.core.contracts.answers import Broken, CheckReport
from clawloop.core.contracts.serving import Engine
from clawloop.core.errors import SetupError
from clawloop.operations.overview import ServiceCounts
from tests.fakes.directory_store import FakeDirectoryStore
from tests.fakes.turn_store import FakeTurnStore


class FakeEngineStore:
    """Satisfies `clawloop.operations.engines.EngineStore`."""

    def __init__(self, directory: FakeDirectoryStore) -> None:
        self._directory = directory

    async def engines(self) -> list[Engine]:
        return list((await self._directory.read()).engines)

    async def add(self, url: str) -> Engine:
        engine = Engine(url.partition("://")[2], url, {}, False)
        self._directory.set_engines([*await self.engines(), engine])
        return engine

    async def set_draining(self, engine_id: str, draining: bool) -> None:
        engines = await self.engines()
        self._directory.set_engines(
            [replace(one, draining=draining) if one.id == engine_id else one for one in engines]
        )

    async def remove(self, engine_id: str) -> None:
        self._directory.set_engines([one for one in await self.engines() if one.id != engine_id])


class FakeEngineProbe:
    """Satisfies `clawloop.operations.engines.EngineProbe`: engines on port 1 are silent, and none is guarded."""

    async def healthy(self, engine: Engine) -> bool:
        return not engine.url.endswith(":1")

    async def check(self, url: str) -> list[str]:
        if not url.startswith("http://"):
            raise SetupError(f"engine address {url!r} must look like http://host:port")
        return []

    async def answers_strangers(self, url: str) -> bool:
        return True


async def check_ledger(files: bool) -> CheckReport:
    """A report of a ledger whose files alone are broken."""
    broken = [Broken(invariant="files", row="v1")] if files else []
    return CheckReport(invariants=19, adapters=int(files), violations=broken)


class FakeOverviewStore:
    """Counts of the turns that a fake store has."""

    def __init__(self, turns: FakeTurnStore) -> None:
        self._turns = turns

    async def counts(self) -> ServiceCounts:
        turns = await self._turns.all()
        sessions = {turn.session_id for turn in turns}
        newest = max((turn.record.started_at for turn in turns), default=None)
        return ServiceCounts(("default",), len(sessions), len(sessions), newest, len(turns), late=0)
