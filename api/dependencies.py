"""The services that routes share: created once by `clawloop.app.processes.gateway`, kept in the application's state."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from fastapi import Request

from api.auth import KeyRing
from api.chat.grammar_slots import GrammarSlots
from api.chat.key_limits import KeyLimiter
from api.chat.lessons import LessonChooser
from api.chat.versions import VersionChooser
from api.recording.notifier import NotificationQueue
from api.recording.recorder import Recorder
from api.stores import (
    FeedbackStore,
    FileReader,
    TurnStore,
)
from api.ui.changes import Changes
from api.ui.logins import Logins
from clawloop.core.contracts.answers import CheckReport
from clawloop.core.contracts.serving import Scope
from clawloop.core.episodes.running import Artifacts, KeyOfEpisode
from clawloop.core.judging.quality import JudgeTrial
from clawloop.core.settings import ChatBounds
from clawloop.core.telemetry.metrics import GatewayMetrics
from clawloop.operations.engines import EngineOperations
from clawloop.operations.export import Exporter
from clawloop.operations.history import HistoryOperations, VotedTurns
from clawloop.operations.keys import KeyOperations
from clawloop.operations.lessons import LessonOperations
from clawloop.operations.overview import Overview, TemporalProblem
from clawloop.operations.probes import ProbeStore
from clawloop.operations.reading import Reading
from clawloop.operations.rollouts import EpisodeReader, RolloutOperations
from clawloop.operations.sessions import SessionOperations
from clawloop.operations.training import TrainingBrowser, TrainingOperations, TrainingStore
from clawloop.operations.workflow_links import WorkflowLinks
from clawloop.serving.chat import ChatEngines
from clawloop.serving.directory import DirectoryCache


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest and slowest request the gateway accepts."""

    body_bytes: int = 32 * 1024 * 1024
    # Enough for an upload on a slow line; a slower body occupies a connection for nothing.
    upload_seconds: float = 120.0
    chat: ChatBounds = field(default_factory=ChatBounds)
    # Fields that go to the engine beside those of `api.chat.fields`.
    engine_fields: tuple[str, ...] = ()
    # Engines find beginnings of prompts again for the same key only.
    cache_per_key: bool = True


@dataclass(slots=True)
class Services:
    """
    Args:
        check_ledger: a report of the broken invariants; also, if asked, of adapters' files with another hash. Raises
            StoreUnavailable.
        not_ready: the reasons that this gateway should get no traffic, one line each; empty if it is ready.
        metrics_page: Prometheus' text format, for a request that came to this port of the gateway.
        found_by_agent: a tar archive of what an environment's task gives its agent, by the names of both; None: this
            gateway does not have the task.
        want_versions: has engines load these versions of a policy for a while, in place of others that were asked for
            so. Raises RecordUnusable without such a policy, and StoreUnavailable.
    """

    keys: KeyRing
    directory: DirectoryCache
    engines: ChatEngines
    recorder: Recorder
    notifications: NotificationQueue
    versions: VersionChooser
    lessons: LessonChooser
    lesson_operations: LessonOperations
    turns: TurnStore
    files: FileReader
    reading: Reading
    feedback: FeedbackStore
    training: TrainingStore
    training_operations: TrainingOperations
    session_operations: SessionOperations
    rollout_operations: RolloutOperations
    episodes: EpisodeReader
    voted_turns: VotedTurns
    newest_trial: Callable[[], Awaitable[JudgeTrial | None]]
    key_of_episode: KeyOfEpisode
    artifacts: Artifacts
    found_by_agent: Callable[[str, str], bytes | None]
    history: HistoryOperations
    engine_operations: EngineOperations
    key_operations: KeyOperations
    check_ledger: Callable[[bool], Awaitable[CheckReport]]
    overview: Overview
    logins: Logins
    training_browser: TrainingBrowser
    changes: Changes
    probes: ProbeStore
    not_ready: Callable[[], Awaitable[list[str]]]
    metrics: GatewayMetrics
    metrics_page: Callable[[int | None], Awaitable[bytes]]
    limits: Limits
    grammar_slots: GrammarSlots
    key_limits: KeyLimiter
    exporter: Exporter
    want_versions: Callable[[str, Sequence[int], timedelta], Awaitable[None]]
    temporal_problem: TemporalProblem
    links: WorkflowLinks = field(default_factory=WorkflowLinks)
    is_draining: Callable[[], bool] = lambda: False
    # Pages that need a key, and the port of this machine alone where they do not.
    guarded_pages: frozenset[str] = frozenset()
    health_port: int = 0
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Start a task that outlives its request; shutdown waits for it."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def finish(self) -> None:
        """Wait for all spawned tasks, and for those they spawn."""
        while self._background:
            await asyncio.wait(set(self._background))


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def admin_services(request: Request) -> Services:
    """The services, for a request with an admin key.

    Raises:
        RequestRejected: 401 without a valid key, 403 without the scope `admin`.
        StoreUnavailable
    """
    services = services_of(request)
    await services.keys.require(request.headers, Scope.ADMIN)
    return services
