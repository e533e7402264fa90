"""One engine's adapters: loaded when wanted, unloaded when no longer needed, watched in between.

The engine's rows in PostgreSQL are reconciled with the adapters it lists, never the other way round: gateways route
by rows. Every activity is idempotent.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from pydantic import Field
from temporalio import activity

from activities.notify import ConcurrentNotifier
from activities.serving.publishing import PublishingStore
from clawloop.core.contracts.notices import EngineAdded, EngineRemoved, Message, Notifier
from clawloop.core.contracts.serving import Engine
from clawloop.core.contracts.training import VersionRef
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.errors import AdapterUnreadable, AdapterUnusable, EngineRejected, EngineUnavailable, RecordUnusable
from clawloop.core.heartbeat import heartbeating
from clawloop.core.ids import version_name

# A version stays loaded this long after another took its place: conversations that began with it go on with it.
KEEP = timedelta(seconds=60)
# Interval of the checks, so how long a dead engine stays in the rows; gateways notice within a second by themselves.
CHECK_SECONDS = 2.0
# Chats wait for an engine that is away, and a connection that is refused costs nothing.
AWAY_CHECK_SECONDS = 0.5
# A busy CPU engine may be silent for a long prompt, each check waits 10 s; one that is silent this often hangs.
MAX_SILENT_CHECKS = 6
# A version the engine rejected may load later: its disk was full, the directory not there yet.
RETRY_SECONDS = 60.0
# A watch ends now and then, so that Temporal sees a live agent and a restarted one takes over.
WATCH_SECONDS = 30 * 60.0
# Gateways read rows once a second: after this none sends requests to a version whose row is gone.
ROUTED_SECONDS = 2.0
# How often a load that waits for a slot checks whether another version ended its last request.
SLOT_POLL_SECONDS = 0.2
PROBLEM_LIMIT = 200  # characters of a reason that cross Temporal; PostgreSQL holds all of it


class EngineControl(Protocol):
    """Controls one vLLM engine. Every method raises EngineUnavailable if the engine does not answer."""

    async def load(self, version: VersionRef, name: str) -> None:
        """Load a version under `name`, and check that it generates one token.

        Raises:
            EngineRejected: the engine cannot load it.
            AdapterUnusable: the files are not those of the version.
            AdapterUnreadable: the files cannot be read now.
        """

    async def unload(self, name: str) -> None: ...

    async def names(self) -> frozenset[str]:
        """Names of the loaded adapters."""

    async def running(self) -> frozenset[str]:
        """Names of the adapters with running or waiting requests."""

    async def slots(self) -> int:
        """Number of adapters whose requests can run at once; requests of further adapters wait."""

    async def healthy(self) -> bool:
        """True if the engine is healthy. Raises EngineUnavailable only on a timeout, which a busy engine may cause."""


class EngineReport(Message):
    """An engine's state when its agent last checked. Versions are named as the engine serves them.

    Args:
        healthy: it answers.
        problem: why it does not answer, or lacks a version; empty if neither.
        versions: loaded, and requests are routed to them.
        missing: wanted and not loaded.
        leaving: loaded and no longer needed.
    """

    engine_id: str
    healthy: bool
    problem: str = ""
    versions: list[str] = Field(default_factory=list)
    missing: list[str] = Field(default_factory=list)
    leaving: list[str] = Field(default_factory=list)


class EngineLoad(Message):
    """Load the versions that are wanted and missing."""

    engine_id: str


class EngineUnload(Message):
    """Unload the versions that are no longer needed."""

    engine_id: str


class EngineWatch(Message):
    """Watch the engine until its state differs from `seen`, or versions have to be loaded or unloaded.

    Args:
        seen: None: return at once.
    """

    engine_id: str
    seen: EngineReport | None = None


@dataclass(frozen=True, slots=True)
class _ReconciledState:
    """Engine state after reconciling its rows with the adapters it has loaded.

    Args:
        rows: names of the versions that requests are routed to.
        wanted: versions the engine should have, by name, oldest first.
        loaded: versions it lists of the policies it serves: name → (policy, number).
    """

    rows: frozenset[str]
    wanted: dict[str, VersionRef]
    loaded: dict[str, tuple[str, int]]

    @property
    def missing(self) -> dict[str, VersionRef]:
        return {name: version for name, version in self.wanted.items() if name not in self.rows}

    @property
    def orphans(self) -> list[str]:
        """Loaded, neither wanted nor routed to: left by an agent that died before it unloaded them."""
        return sorted(name for name in self.loaded if name not in self.wanted and name not in self.rows)


class EngineActivities:
    """Activities that load and unload versions in one engine; on the queue `engine-{id}`, beside the engine.

    Args:
        keep: how long a version stays loaded after another took its place.
        check_seconds: how often a watch checks the engine.
        routed_seconds: how long gateways may go on sending requests to a version whose row is deleted.
    """

    def __init__(
        self,
        store: PublishingStore,
        control: EngineControl,
        *,
        keep: timedelta = KEEP,
        check_seconds: float = CHECK_SECONDS,
        away_check_seconds: float = AWAY_CHECK_SECONDS,
        routed_seconds: float = ROUTED_SECONDS,
    ) -> None:
        self._store = store
        self._control = control
        self._keep = keep
        self._check_seconds = check_seconds
        self._away_check_seconds = away_check_seconds
        self._routed_seconds = routed_seconds
        # Nothing may be loaded or unloaded between listing the engine's adapters and writing its rows.
        self._lock = asyncio.Lock()
        self._rejected: dict[str, str] = {}
        self._silent_checks = 0
        self._reported: EngineReport | None = None  # what the workflow has
        self._changing = 0  # running loads and unloads, which report the change themselves

    @activity.defn
    async def load_versions(self, request: EngineLoad) -> EngineReport:
        """Load the versions that are wanted and missing, oldest first, each as soon as the engine has a free slot.

        Raises:
            EngineUnavailable: retry; the engine may be restarting.
            StoreUnavailable
        """
        async with heartbeating(), self._changes_versions():
            rejected: dict[str, str] = {}
            while True:
                async with self._lock:
                    state = await self._reconcile(await self._engine(request.engine_id))
                    waiting = [name for name in state.missing if name not in rejected]
                    if (name := await self._first_with_room(state, waiting)) is not None:
                        try:
                            await self._load(request.engine_id, state.missing[name], name)
                        except (EngineRejected, AdapterUnusable, AdapterUnreadable) as error:
                            rejected[name] = _why(error)
                        continue
                if not waiting:
                    break
                await asyncio.sleep(SLOT_POLL_SECONDS)
            self._rejected = rejected
            return await self._check(request.engine_id)

    @activity.defn
    async def unload_versions(self, request: EngineUnload) -> EngineReport:
        """Delete rows of versions that are neither wanted nor were active lately, then unload those without requests.

        Raises:
            EngineRejected, EngineUnavailable, StoreUnavailable
        """
        async with heartbeating(), self._changes_versions():
            for version in await self._store.unloadable(request.engine_id, self._keep):
                await self._store.unloaded(request.engine_id, version.policy, version.n)
            crash_point(CrashPoint.UNROUTED_NOT_UNLOADED)
            await asyncio.sleep(self._routed_seconds)
            async with self._lock:
                state = await self._reconcile(await self._engine(request.engine_id))
                running = await self._control.running()
                for name in state.orphans:
                    if name not in running:
                        await self._control.unload(name)
            return await self._check(request.engine_id)

    @activity.defn
    async def watch_engine(self, request: EngineWatch) -> EngineReport:
        """Check the engine until its state changes or versions have to be loaded or unloaded; at most half an hour."""
        async with heartbeating():
            began = time.monotonic()
            self._reported = request.seen
            while True:
                before = self._reported
                now = await self._check(request.engine_id, report=False)
                waited = time.monotonic() - began
                to_do = now.healthy and bool(now.missing or now.leaving)
                worth_reporting = now != before or (to_do and waited > RETRY_SECONDS) or waited > WATCH_SECONDS
                # A load or an unload reports the state after it, and may have done so since this check began.
                reported_elsewhere = before is not self._reported or (self._changing and now.healthy)
                if worth_reporting and not reported_elsewhere:
                    self._reported = now
                    return now
                await asyncio.sleep(self._check_seconds if now.healthy else self._away_check_seconds)

    @asynccontextmanager
    async def _changes_versions(self) -> AsyncIterator[None]:
        self._changing += 1
        try:
            yield
        finally:
            self._changing -= 1

    async def _check(self, engine_id: str, *, report: bool = True) -> EngineReport:
        """The engine's state, once its rows are reconciled with it.

        Args:
            report: the caller returns the state to the workflow.
        """
        try:
            async with self._lock:
                current = await self._reconciled_state_of(engine_id)
        except RecordUnusable:
            current = EngineReport(
                engine_id=engine_id, healthy=False, problem="not among the engines: clawloop engine add"
            )
        if report:
            self._reported = current
        return current

    async def _reconciled_state_of(self, engine_id: str) -> EngineReport:
        engine = await self._engine(engine_id)
        if (problem := await self._health_problem()) is not None:
            if _rows(engine):
                await self._store.forget(engine_id)
            await self._record_problem(engine, problem)
            return EngineReport(engine_id=engine_id, healthy=False, problem=problem)
        try:
            state = await self._reconcile(engine)
            unloadable = {version_name(v.policy, v.n, "") for v in await self._store.unloadable(engine_id, self._keep)}
            leaving = unloadable | set(state.orphans)
            if leaving:
                leaving -= await self._control.running()
        except EngineUnavailable:  # the next health check decides
            current = self._reported
            return current or EngineReport(engine_id=engine_id, healthy=False, problem="does not answer")
        problem = "; ".join(f"{name}: {why}" for name, why in self._rejected.items() if name in state.missing)
        await self._record_problem(engine, problem)
        return EngineReport(
            engine_id=engine_id,
            healthy=True,
            problem=problem[:PROBLEM_LIMIT],
            versions=sorted(state.rows),
            missing=list(state.missing),
            leaving=sorted(leaving),
        )

    async def _health_problem(self) -> str | None:
        """The reason that the engine cannot be used; None if it can."""
        try:
            healthy = await self._control.healthy()
            self._silent_checks = 0
            return None if healthy else "does not answer"
        except EngineUnavailable:
            self._silent_checks += 1
            return "silent for a minute" if self._silent_checks >= MAX_SILENT_CHECKS else None

    async def _reconcile(self, engine: Engine) -> _ReconciledState:
        """Delete rows of versions the engine does not list, and read what it should have."""
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
            rows=frozenset(name for name in rows if name not in lost),
            wanted=wanted,
            loaded={name: version for name in listed if (version := _parse_version(name)) and version[0] in policies},
        )

    async def _first_with_room(self, state: _ReconciledState, waiting: Sequence[str]) -> str | None:
        """The oldest of these versions whose policy has fewer versions in use in this engine than it has slots.

        Other policies do not count: with more policies than slots requests take turns, and no policy may keep another
        from learning.
        """
        if len(state.loaded) < 2 or not waiting:
            return next(iter(waiting), None)  # saves requests to the engine
        busy = await self._control.running() | (state.rows & state.wanted.keys())
        of_policy = Counter(version[0] for name in busy if (version := _parse_version(name)))
        most = max(2, await self._control.slots())
        return next((name for name in waiting if of_policy[state.missing[name].policy] < most), None)

    async def _load(self, engine_id: str, version: VersionRef, name: str) -> None:
        await self._control.load(version, name)
        crash_point(CrashPoint.LOADED_NOT_ROUTED)
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

    async def _record_problem(self, engine: Engine, problem: str) -> None:
        if (engine.problem or "") != problem:
            await self._store.report(engine.id, problem or None)


def _rows(engine: Engine) -> dict[str, tuple[str, int]]:
    return {version_name(policy, n, ""): (policy, n) for policy, ns in engine.versions.items() for n in ns if n}


def _parse_version(name: str) -> tuple[str, int] | None:
    """The policy and number of a version's name; None if the name is not a version's."""
    policy, separator, number = name.rpartition("-v")
    return (policy, int(number)) if separator and number.isdecimal() else None


def _why(error: EngineRejected | AdapterUnusable | AdapterUnreadable) -> str:
    return str(error.error.get("message", error)) if isinstance(error, EngineRejected) else str(error)


class EngineReconciler:
    """Gives each engine a running workflow, and ends that of a removed engine, as part of the sweep.

    Args:
        running: engines with a running workflow; raises SignalFailed.
    """

    def __init__(
        self, store: PublishingStore, notifier: Notifier, running: Callable[[], Awaitable[frozenset[str]]]
    ) -> None:
        self._store = store
        self._notifier = notifier
        self._running = running

    async def reconcile(self) -> int:
        """Start missing engine workflows, end workflows of removed engines; returns both numbers.

        Raises:
            StoreUnavailable
            SignalFailed: names the engines. The others were reconciled, and the next sweep retries.
        """
        # Read the workflows before the engines: for an engine added in between, the second start has no effect, and no
        # workflow is ended wrongly.
        running = await self._running()
        engines = {engine.id for engine in await self._store.engines()}

        async def begin_or_end(engine_id: str) -> None:
            await self._notifier.notify(EngineAdded(engine_id) if engine_id in engines else EngineRemoved(engine_id))

        differing = sorted(engines ^ running)
        notifier = ConcurrentNotifier[str]("engine")
        await notifier.notify_each(differing, str, begin_or_end)
        notifier.raise_if_any_failed()
        return len(differing)
