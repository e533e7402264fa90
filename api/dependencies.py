"""What the routes share, made once by `clawloop.processes.gateway` and hung on the app."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field

from fastapi import Request

from api.auth import KeyRing
from api.chat.versions import VersionChooser
from api.directory import DirectoryCache
from api.ports import (
    Engines,
    Erasures,
    FeedbackStore,
    Operations,
    Readiness,
    RejudgeStore,
    SessionOperations,
    SessionStore,
    TrainingStore,
)
from api.recording.notifier import NotificationQueue
from api.recording.recorder import Recorder
from clawloop.telemetry.metrics import GatewayMetrics


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may ask of the gateway."""

    body_bytes: int = 32 * 1024 * 1024
    # An upload on a slow line; a body that takes longer holds a connection for nothing.
    upload_seconds: float = 120.0


@dataclass(slots=True)
class Services:
    keys: KeyRing
    directory: DirectoryCache
    engines: Engines
    recorder: Recorder
    notifications: NotificationQueue
    versions: VersionChooser
    sessions: SessionStore
    feedback: FeedbackStore
    training: TrainingStore
    rejudging: RejudgeStore
    erasures: Erasures
    session_operations: SessionOperations
    operations: Operations
    readiness: Readiness
    metrics: GatewayMetrics
    limits: Limits
    max_lora_rank: int  # of the adapters that engines take
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Let work go on even when its request is gone; shutdown waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def finish(self) -> None:
        """Wait for all that was spawned, and for what that spawns in turn."""
        while self._background:
            await asyncio.wait(set(self._background))


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services
