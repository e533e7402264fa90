"""One engine's adapters: loaded when they are wanted, unloaded when nobody needs them, watched in between.

Knows nothing about what is trained or which version answers. What Postgres says the engine has is brought to what
it lists, never the other way round: requests go where a row says they can. Doing anything twice does no harm.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta

from temporalio import activity

from activities.heartbeat import heartbeating
from activities.serving.messages import PROBLEM_LIMIT, EngineHas, EngineLoad, EngineUnload, EngineWatch
from activities.training.ports import EngineControl, PublishingStore
from clawloop.contracts.serving import Engine
from clawloop.contracts.training import VersionRef
from clawloop.errors import AdapterUnusable, EngineRejected, EngineUnavailable, RecordUnusable
from clawloop.ids import version_name

# A version stays this long after another took its place: replies and tool steps that began with it go on with it.
KEEP = timedelta(seconds=60)
# How long an engine that died may be routed to; a gateway notices within a second by itself.
LOOK_SECONDS = 2.0
# A busy CPU engine may be silent for a long prompt, each look waits 10 s; one that is silent this often hangs.
SILENT_LOOKS = 6
# What an engine refused may load later: its disk was full, the directory not there yet.
RETRY_SECONDS = 60.0
# A watch ends now and then, so that Temporal sees a live agent and a new one takes over.
WATCH_SECONDS = 30 * 60.0
# Gateways look once a second: after this none sends requests to a version whose row is gone.
ROUTED_SECONDS = 2.0
# How soon a version that ended its last request is noticed by one that waits for its place.
ROOM_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class _ReconciledState:
    """What is so, once rows say no more than the engine lists.

    Args:
        listed: the adapters it has.
        rows: those that requests are routed to.
        wanted: what it should have, by name, oldest first.
        known: all versions of the policies it serves that it lists: name → (policy, number).
    """

    listed: frozenset[str]
    rows: frozenset[str]
    wanted: dict[str, VersionRef]
    known: dict[str, tuple[str, int]]

    @property
    def missing(self) -> dict[str, VersionRef]:
        return {name: version for name, version in self.wanted.items() if name not in self.rows}

    @property
    def orphans(self) -> list[str]:
        """Listed, neither wanted nor routed to: left by an agent that ended before it unloaded them."""
        return sorted(name for name in self.known if name not in self.wanted and name not in self.rows)


class EngineActivities:
    """On the queue `engine-{id}`, beside the engine.

    Args:
        keep: how long a version stays loaded after another took its place.
        look_seconds: how often the engine is looked at.
        routed_seconds: how long gateways may go on sending requests to what was taken from them.
    """

    def __init__(
        self,
        store: PublishingStore,
        control: EngineControl,
        *,
        keep: timedelta = KEEP,
        look_seconds: float = LOOK_SECONDS,
        routed_seconds: float = ROUTED_SECONDS,
    ) -> None:
        self._store = store
        self._control = control
        self._keep = keep
        self._look_seconds = look_seconds
        self._routed_seconds = routed_seconds
        # Between asking the engine what it has and writing that down, nothing may be loaded or unloaded.
        self._lock = asyncio.Lock()
        self._refused: dict[str, str] = {}
        self._silent = 0
        self._told: EngineHas | None = None
        self._at_work = 0  # loads and unloads, which tell themselves what they changed

    @activity.defn(name="load_versions")
    async def load_versions(self, ask: EngineLoad) -> EngineHas:
        """Load what is wanted and missing, oldest first, each as soon as there is room for one more.

        Raises:
            EngineUnavailable: ask again; it may be restarting.
            StoreUnavailable
        """
        async with heartbeating(), self._working():
            refused: dict[str, str] = {}
            while True:
                async with self._lock:
                    state = await self._reconcile(await self._engine(ask.engine_id))
                    waiting = [name for name in state.missing if name not in refused]
                    if waiting and await self._has_room(state, state.missing[waiting[0]].policy):
                        name = waiting[0]
                        try:
                            await self._load(ask.engine_id, state.missing[name], name)
                        except (EngineRejected, AdapterUnusable) as error:
                            refused[name] = _why(error)
                        continue
                if not waiting:
                    break
                await asyncio.sleep(ROOM_SECONDS)
            self._refused = refused
            return await self._look(ask.engine_id)

    @activity.defn(name="unload_versions")
    async def unload_versions(self, ask: EngineUnload) -> EngineHas:
        """Take from gateways what is neither wanted nor was active lately, then unload what no request needs.

        Raises:
            EngineRejected, EngineUnavailable, StoreUnavailable
        """
        async with heartbeating(), self._working():
            for version in await self._store.unloadable(ask.engine_id, self._keep):
                await self._store.unloaded(ask.engine_id, version.policy, version.n)
            await asyncio.sleep(self._routed_seconds)
            async with self._lock:
                state = await self._reconcile(await self._engine(ask.engine_id))
                running = await self._control.running()
                for name in state.orphans:
                    if name not in running:
                        await self._control.unload(name)
            return await self._look(ask.engine_id)

    @activity.defn(name="watch_engine")
    async def watch_engine(self, ask: EngineWatch) -> EngineHas:
        """Look until something is to be done, or is not as it was; at most half an hour."""
        async with heartbeating():
            began = time.monotonic()
            self._told = ask.seen
            while True:
                before = self._told
                now = await self._look(ask.engine_id, tell=False)
                waited = time.monotonic() - began
                to_do = now.healthy and bool(now.missing or now.leaving)
                worth_notifying = now != before or (to_do and waited > RETRY_SECONDS) or waited > WATCH_SECONDS
                told_elsewhere = before is not self._told or (self._at_work and now.healthy)
                if worth_notifying and not told_elsewhere:
                    self._told = now
                    return now
                await asyncio.sleep(self._look_seconds)

    @asynccontextmanager
    async def _working(self) -> AsyncIterator[None]:
        self._at_work += 1
        try:
            yield
        finally:
            self._at_work -= 1

    async def _look(self, engine_id: str, *, tell: bool = True) -> EngineHas:
        """How the engine stands, after Postgres was told."""
        try:
            async with self._lock:
                has = await self._look_at(engine_id)
        except RecordUnusable:
            has = EngineHas(engine_id=engine_id, healthy=False, problem="not among the engines: clawloop engine add")
        if tell:
            self._told = has
        return has

    async def _look_at(self, engine_id: str) -> EngineHas:
        engine = await self._engine(engine_id)
        if (ill := await self._illness()) is not None:
            if _rows(engine):
                await self._store.forget(engine_id)
            await self._report(engine, ill)
            return EngineHas(engine_id=engine_id, healthy=False, problem=ill)
        try:
            state = await self._reconcile(engine)
            gone = {version_name(v.policy, v.n, "") for v in await self._store.unloadable(engine_id, self._keep)}
            leaving = gone | set(state.orphans)
            if leaving:
                leaving -= await self._control.running()
        except EngineUnavailable:  # the next look says more about it
            has = self._told
            return has if has is not None else EngineHas(engine_id=engine_id, healthy=False, problem="does not answer")
        problem = "; ".join(f"{name}: {why}" for name, why in self._refused.items() if name in state.missing)
        await self._report(engine, problem)
        return EngineHas(
            engine_id=engine_id,
            healthy=True,
            problem=problem[:PROBLEM_LIMIT],
            versions=sorted(state.rows),
            missing=list(state.missing),
            leaving=sorted(leaving),
        )

    async def _illness(self) -> str | None:
        """Why the engine cannot be used; None if it can."""
        try:
            healthy = await self._control.healthy()
            self._silent = 0
            return None if healthy else "does not answer"
        except EngineUnavailable:
            self._silent += 1
            return "silent for a minute" if self._silent >= SILENT_LOOKS else None

    async def _reconcile(self, engine: Engine) -> _ReconciledState:
        listed = await self._control.names()
        rows = _rows(engine)
        lost = {name: version for name, version in rows.items() if name not in listed}
        if lost and len(lost) == len(rows):
            await self._store.forget(engine.id)  # it was restarted
        else:
            for policy, number in lost.values():
                await self._store.unloaded(engine.id, policy, number)
        wanted = {version_name(v.policy, v.n, ""): v for v in await self._store.wanted(engine.id) if v.n}
        policies = {v.policy for v in wanted.values()} | set(engine.versions)
        return _ReconciledState(
            listed=listed,
            rows=frozenset(name for name in rows if name not in lost),
            wanted=wanted,
            known={name: said for name in listed if (said := _version(name)) and said[0] in policies},
        )

    async def _has_room(self, state: _ReconciledState, policy: str) -> bool:
        """Whether one more version of the policy can have requests beside those that have, or are about to.

        Other policies do not count: more of them than slots only take turns, and none may keep another from learning.
        """
        if len(state.known) < 2:
            return True  # saves a question where it cannot matter
        busy = await self._control.running() | (state.rows & state.wanted.keys())
        own = [name for name in busy if (said := _version(name)) and said[0] == policy]
        return len(own) < max(2, await self._control.slots())

    async def _load(self, engine_id: str, version: VersionRef, name: str) -> None:
        await self._control.load(version, name)
        await self._store.loaded(engine_id, version.policy, version.n)

    async def _engine(self, engine_id: str) -> Engine:
        """
        Raises:
            RecordUnusable: there is no such engine.
        """
        for engine in await self._store.engines():
            if engine.id == engine_id:
                return engine
        raise RecordUnusable(f"there is no engine {engine_id}")

    async def _report(self, engine: Engine, problem: str) -> None:
        if (engine.problem or "") != problem:
            await self._store.report(engine.id, problem or None)


def _rows(engine: Engine) -> dict[str, tuple[str, int]]:
    return {version_name(policy, n, ""): (policy, n) for policy, ns in engine.versions.items() for n in ns if n}


def _version(name: str) -> tuple[str, int] | None:
    """The policy and number that a name of a version says; None if it is none."""
    policy, found, number = name.rpartition("-v")
    return (policy, int(number)) if found and number.isdecimal() else None


def _why(error: EngineRejected | AdapterUnusable) -> str:
    return str(error.error.get("message", error)) if isinstance(error, EngineRejected) else str(error)
