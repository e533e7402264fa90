"""Operators' changes to engines: list them with their health, add, drain and remove them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from clawloop.core.contracts.answers import EngineAdded, EngineList, EngineStatus
from clawloop.core.contracts.serving import Engine
from clawloop.core.errors import AmbiguousId, NotFound, SetupError, StateConflict


class EngineStore(Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    async def engines(self) -> list[Engine]:
        """All engines, in the order of their ids."""

    async def add(self, url: str) -> Engine:
        """Add an engine, or take an existing one back into rotation.

        Raises:
            SetupError: the URL is not an http address.
        """

    async def set_draining(self, engine_id: str, draining: bool) -> None: ...

    async def remove(self, engine_id: str) -> None: ...


class EngineProbe(Protocol):
    async def healthy(self, engine: Engine) -> bool:
        """True if the engine answers."""

    async def check(self, url: str) -> list[str]:
        """Lines about an engine that could not be compared with the policies.

        Raises:
            SetupError: it serves another model.
        """

    async def answers_strangers(self, url: str) -> bool:
        """True if the engine answers requests without a secret."""


class EngineOperations:
    """Every method raises StoreUnavailable; those that name an engine also NotFound and AmbiguousId."""

    def __init__(self, store: EngineStore, probe: EngineProbe) -> None:
        self._store = store
        self._probe = probe

    async def list(self) -> EngineList:
        """The engines, and whether each answers."""
        engines = await self._store.engines()
        return EngineList(engines=await asyncio.gather(*(self._status(engine) for engine in engines)))

    async def add(self, url: str, *, require_guard: bool) -> EngineAdded:
        """Let gateways send requests to one more engine.

        Args:
            require_guard: refuse an engine that does not require authentication.

        Raises:
            SetupError: the URL is not an http address, it serves another model, or it is not guarded.
        """
        warnings = await self._probe.check(url)
        if await self._probe.answers_strangers(url):
            unguarded = f"{url} does not require authentication: start it with the engine guard"
            if require_guard:
                raise SetupError(f"{unguarded}, or leave out --require-guard")
            warnings.append(f"{unguarded} (docs/deploying.md, Keys).")
        engine = await self._store.add(url)
        return EngineAdded(engine=await self._status(engine), warnings=warnings)

    async def drain(self, reference: str, *, undo: bool, force: bool) -> EngineStatus:
        """Send an engine no new requests, or send some again.

        Args:
            force: also if no other engine takes requests.

        Raises:
            StateConflict: no other engine takes requests.
        """
        engines = await self._store.engines()
        engine = _find(engines, reference)
        if not undo and not force:
            _require_another(engines, engine, "drained")
        await self._store.set_draining(engine.id, not undo)
        return await self._status(next(one for one in await self._store.engines() if one.id == engine.id))

    async def remove(self, reference: str, *, force: bool) -> str:
        """Forget an engine; returns its id. Running replies are not waited for.

        Raises:
            StateConflict: it takes requests, and no other engine does.
        """
        engines = await self._store.engines()
        engine = _find(engines, reference)
        if not engine.draining and not force:
            _require_another(engines, engine, "removed")
        await self._store.remove(engine.id)
        return engine.id

    async def _status(self, engine: Engine) -> EngineStatus:
        return EngineStatus(
            id=engine.id,
            url=engine.url,
            healthy=await self._probe.healthy(engine),
            draining=engine.draining,
            versions={policy: sorted(versions) for policy, versions in engine.versions.items()},
            problem=engine.problem,
        )


def _find(engines: Sequence[Engine], reference: str) -> Engine:
    found = [engine for engine in engines if reference in (engine.id, engine.url)]
    found = found or [engine for engine in engines if reference and engine.id.startswith(reference)]
    if not found:
        raise NotFound(
            f"There is no engine {reference!r}; `clawloop engine list` shows them.", code="not_found", field="engine"
        )
    if len(found) > 1:
        ids = ", ".join(engine.id for engine in found)
        raise AmbiguousId(f"{reference!r} may be several engines: {ids}. Give one of them.", field="engine")
    return found[0]


def _require_another(engines: Sequence[Engine], engine: Engine, done: str) -> None:
    if engine.draining or any(other.id != engine.id and not other.draining for other in engines):
        return
    raise StateConflict(
        f"{engine.id} is the only engine that takes requests: once it is {done}, every chat gets 503. Add another "
        "engine first, or force it.",
        code="last_engine",
        field="engine",
    )
