"""Publishes a policy's newest version: notifies engines, waits until they have it, and activates it.

Whatever happens meanwhile, the version that is activated is the head at that moment, and only if an engine has it: the
store checks both in its transaction.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from temporalio import activity

from activities.training.steps import StepStore
from clawloop.core.contracts.notices import Message, Notifier, VersionToLoad
from clawloop.core.contracts.serving import AdapterDirectory, Engine
from clawloop.core.contracts.training import TrainingView, VersionRef
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.errors import EngineUnavailable, SignalFailed
from clawloop.core.gate.canary import version_for_all
from clawloop.core.heartbeat import heartbeating

log = logging.getLogger(__name__)

# An engine that needs longer leaves rotation until it has caught up, so that one slow engine does not hold learning.
WAIT_SECONDS = 30.0
# Loading takes about 50 ms; reading the engines' rows takes 2.
POLL_SECONDS = 0.05
# A newer version may be committed while engines load this one; then engines must have the newer one.
REFRESH_SECONDS = 1.0


class PublishingStore(Protocol):
    """Stores which versions engines should have and have loaded, and which one is active.

    Every method is one transaction. It raises StoreUnavailable if PostgreSQL does not answer in time, and
    RecordUnusable if the policy, version or engine does not exist.
    """

    async def engines(self) -> list[Engine]:
        """All engines with their loaded versions."""

    async def wanted(self, engine_id: str) -> list[VersionRef]:
        """The versions this engine should have: head, active and pinned one of each policy, oldest first."""

    async def loaded(self, engine_id: str, policy: str, n: int) -> None:
        """Record that the engine has loaded a version. Idempotent."""

    async def unloaded(self, engine_id: str, policy: str, n: int) -> None:
        """Record that the engine has unloaded a version. Idempotent."""

    async def forget(self, engine_id: str) -> None:
        """Record that the engine has lost all its versions: only the base model is routed there."""

    async def report(self, engine_id: str, problem: str | None) -> None:
        """Record why the engine is out of rotation; None: it works."""

    async def activate(self, policy: str, n: int, epoch: int) -> bool:
        """Make version `n` the active one and notify gateways; False if that is not permitted.

        Permitted is a version that an engine in rotation has loaded, within the same epoch and while no other version
        is pinned. It must be on the path to the head, and newer than the active version if that is on the path too.
        """

    async def unloadable(self, engine_id: str, age: timedelta) -> list[VersionRef]:
        """The engine's loaded versions that are not wanted and were neither active nor loaded within `age`."""

    async def removable(self, age: timedelta) -> list[VersionRef]:
        """Versions whose files can be removed.

        They were created and retired longer than `age` ago, are on no engine, not wanted and not among the newest of
        the path. No claimed step starts from them; they answered no waiting turn and no waiting sample with a hint.
        """

    async def mark_removed(self, policy: str, n: int, age: timedelta) -> bool:
        """Record that a version's files are removed; False if it is not removable any more."""

    async def has_files_at(self, path: str) -> bool:
        """True if a version whose files are not removed has them here: policies may share a directory."""

    async def leftover(self, directories: Sequence[AdapterDirectory]) -> list[AdapterDirectory]:
        """Return the directories whose step has ended and that belong to no version.

        A late attempt needs its step's row to be claimed, so this needs no age. Directories of unknown steps belong to
        another installation and are not returned.
        """


class PublishVersion(Message):
    """Publish the policy's newest version, whichever that is when the activity ends.

    While no engine has it, the activity raises EngineUnavailable and Temporal retries, so that waiting for an engine
    adds no events to the workflow's history.
    """

    policy: str


class Published(Message):
    """
    Args:
        head: the newest committed version on the current path.
        version: the version that answers now.
        engines: how many engines have it.
        missing: how many engines left rotation until they have it.
        reason: why the head does not answer, e.g. another version is pinned; empty if it does.
        waited_seconds: how long publishing took.
    """

    policy: str
    head: int
    version: int
    engines: int
    missing: int
    reason: str
    waited_seconds: float


class PublishingActivities:
    """Activities that publish versions; on the queue `ledger`.

    Args:
        wait_seconds: after this long the version is activated on the engines that have it, without the others.
    """

    def __init__(
        self,
        store: PublishingStore,
        steps: StepStore,
        notifier: Notifier,
        *,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._store = store
        self._steps = steps
        self._notifier = notifier
        self._wait_seconds = wait_seconds

    @activity.defn
    async def publish_version(self, request: PublishVersion) -> Published:
        """Activate the newest version, once every engine in rotation has it, or after 30 s if some have.

        Raises:
            EngineUnavailable: no engine has it yet; retry.
            RecordUnusable: there is no such policy.
            StoreUnavailable
        """
        async with heartbeating():
            began = time.monotonic()
            until = began + self._wait_seconds
            while True:
                view = await self._steps.status(request.policy)
                if not view.unpublished:
                    return _published(view, _target(view), [], [], began)
                await self._notify(await self._store.engines())
                having, missing = await self._wait(view, until)
                if having:
                    crash_point(CrashPoint.NOT_ACTIVATED)
                if having and await self._store.activate(view.policy, _target(view), view.epoch):
                    return _published(view, _target(view), having, missing, began)
                if time.monotonic() > until:
                    raise EngineUnavailable(f"no engine has version {_target(view)} of {view.policy} yet")
                # The view is stale: a newer version, another epoch, a pin.
                await asyncio.sleep(POLL_SECONDS)

    async def _notify(self, engines: Sequence[Engine]) -> None:
        loading = [engine.id for engine in engines if not engine.draining]
        notices = [self._notifier.notify(VersionToLoad(engine_id)) for engine_id in loading]
        for engine_id, error in zip(loading, await asyncio.gather(*notices, return_exceptions=True), strict=True):
            if isinstance(error, SignalFailed):  # its agent checks every two seconds by itself
                facts = {"engine_id": engine_id, "why": str(error)}
                log.warning("signal failed: an engine has a version to load", extra=facts)
            elif error is not None:
                raise error

    async def _wait(self, view: TrainingView, until: float) -> tuple[list[str], list[str]]:
        """The engines in rotation that have the version, and those that do not.

        If no engine has it, the caller must read the view again.
        """
        n = _target(view)
        refresh_at = time.monotonic() + REFRESH_SECONDS
        while True:
            engines = [engine for engine in await self._store.engines() if not engine.draining]
            # An engine with a problem may still have this version: the problem may be with another version.
            having = [engine.id for engine in engines if _has(engine, view.policy, n)]
            missing = [engine.id for engine in engines if engine.id not in having]
            # An engine that lacks it and reports a problem is not waited for.
            slow = [engine for engine in engines if engine.problem is None and engine.id in missing]
            if (having and not slow) or time.monotonic() > until:
                return having, missing
            if time.monotonic() > refresh_at:
                return [], missing
            await asyncio.sleep(POLL_SECONDS)


def _target(view: TrainingView) -> int:
    return version_for_all(view.head, view.pinned, view.canary_parent)


def _has(engine: Engine, policy: str, n: int) -> bool:
    return (n == 0 and engine.problem is None) or n in engine.versions.get(policy, frozenset())


def _why_not_head(view: TrainingView, version: int) -> str:
    if version == view.head:
        return ""
    return f"version {version} is pinned" if view.pinned is not None else f"version {view.canary} is a canary"


def _published(
    view: TrainingView, version: int, having: Sequence[str], missing: Sequence[str], began: float
) -> Published:
    waited = time.monotonic() - began
    if version != view.version:
        facts = {"policy": view.policy, "version": version, "engines": having, "engines_without": missing}
        log.info("version activated", extra=facts | {"waited_seconds": round(waited, 3)})
    return Published(
        policy=view.policy,
        head=view.head,
        version=version,
        engines=len(having),
        missing=len(missing),
        reason=_why_not_head(view, version),
        waited_seconds=waited,
    )
