"""Assembles the gateway: connects the ports of `api` with their adapters, and serves the application."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import aiohttp
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp
from temporalio.client import Client

from api.app import create_app
from api.auth import KeyRing
from api.chat.grammar_slots import GrammarSlots
from api.chat.key_limits import KeyLimiter, StoredBytes
from api.chat.lessons import LessonChooser
from api.chat.versions import VersionChooser
from api.dependencies import Limits, Services
from api.http_protocol import BoundedHttpProtocol
from api.recording.notifier import NotificationQueue
from api.recording.recorder import Recorder
from api.recording.spool import Spool
from api.ui.changes import Changes
from api.ui.logins import Logins
from clawloop.app.processes.database import compare_keys, open_database, require_marked_keys, sealer_of, write_mark
from clawloop.app.processes.draining_server import CUT_SECONDS, DrainingServer
from clawloop.app.processes.endpoints import (
    database_url,
    engine_secret,
    installation_id,
    temporal_address,
    workflow_links,
)
from clawloop.app.processes.operations import DatabaseCheck, NoTemporal, Operations
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.app.temporal.server import TemporalEnvironmentWorkers, TemporalWatch
from clawloop.core.contracts.serving import Engine
from clawloop.core.crash_points import CrashPoint, arm_crash_points, crash_point
from clawloop.core.errors import SetupError, StoreUnavailable
from clawloop.core.settings import Settings
from clawloop.core.telemetry.metrics import GatewayMetrics, LabelledRegistry, merge_pages, page_of
from clawloop.core.telemetry.tracing import tracing
from clawloop.environments.artifacts import open_artifacts
from clawloop.environments.choice import found_by_agent
from clawloop.operations.export import Exporter
from clawloop.operations.lessons import LessonOperations
from clawloop.serving.chat import ChatEngines
from clawloop.serving.directory import DirectoryCache
from clawloop.serving.rotation import Rotation
from db.content import ContentCodec
from db.database import BACKGROUND_LIMIT, CHAT_LIMIT, Database
from db.episodes.groups import PostgresEpisodeStore
from db.export import PostgresExportStore
from db.judging.feedback import PostgresFeedbackStore
from db.judging.rejudging import PostgresVoteReader
from db.judging.trials import PostgresTrialStore
from db.lessons.ledger import PostgresLessonStore
from db.schema import is_current, require_known_schema
from db.serving.directory import PostgresDirectoryStore, PostgresListener
from db.serving.engines import add_missing_engines
from db.serving.keys import PostgresKeyStore
from db.serving.publishing import PostgresPublishingStore
from db.training.operators import PostgresTrainingStore
from db.training.probes import PostgresProbeStore
from db.training.status import PostgresTrainingBrowser
from db.turns.files import PostgresFileStore
from db.turns.insert import PostgresTurnStore
from db.turns.read import ConversationCache

log = logging.getLogger(__name__)

# A vLLM engine takes 45-75 s to restart on two cores. OpenClaw retries a 503 with a rewritten message, so hold instead.
HOLD_SECONDS = 150.0
# Held requests keep their bodies in memory: 9 MB for 256 of OpenClaw's 35 KB; bodies of 32 MiB are rare.
HOLD_LIMIT = 256
# About 3,000 turns of a 32k-token conversation: a day without Postgres for one busy person.
SPOOL_LIMIT_BYTES = 1024**3
# A person who looks at a page waits so long for a busy database, and not longer for one that is away.
PAGE_LIMIT = timedelta(seconds=5)
# Python looks for garbage after so many new objects, 700 by default: with 64 streams hundreds of times a second, and
# hardly any of a stream's objects form cycles.
_GARBAGE_OBJECTS = 20_000
# Longer than most replies, shorter than the 90 s after which systemd and our deployments kill.
DRAIN = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Sockets and limits of one gateway.

    Args:
        listener: bound; several gateways may share it.
        name: labels its metrics; None for a gateway alone.
        health_port: loopback port where this process alone answers; 0: none.
        peers: health ports of the gateways on the same socket.
        drain: how long replies may go on after SIGTERM.
    """

    listener: socket.socket
    name: str | None = None
    health_port: int = 0
    peers: tuple[int, ...] = ()
    drain: timedelta = DRAIN
    allowed_hosts: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    hold_seconds: float = HOLD_SECONDS
    hold_limit: int = HOLD_LIMIT


class GatewayReadiness:
    """Ready with a current schema in PostgreSQL and a healthy engine."""

    def __init__(
        self,
        database: Database,
        engines: ChatEngines,
        directory: Callable[[], Sequence[Engine]],
        is_draining: Callable[[], bool],
        is_nearly_full: Callable[[], bool] = lambda: False,
    ) -> None:
        self._database = database
        self._directory = directory
        self._engines = engines
        self._is_draining = is_draining
        self._is_nearly_full = is_nearly_full
        self._asking: asyncio.Task[list[str]] | None = None

    async def problems(self) -> list[str]:
        """The reasons that this gateway should get no traffic, one line each; empty if it is ready.

        Found once for all that ask at the same time: they need no key, and the connections are those of chats.
        """
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> list[str]:
        found: list[str] = ["this gateway is being stopped"] if self._is_draining() else []
        try:
            if not await is_current(self._database):
                found.append("the database schema is not this version's: run `clawloop migrate`")
        except StoreUnavailable as error:
            # The error contains host and user name, so it goes to the log only.
            log.warning("not ready", extra={"why": str(error)})
            found.append("PostgreSQL does not answer; the log says why")
        if (problem := self._engine_problem()) is not None:
            found.append(problem)
        if self._is_nearly_full():
            found.append("neither PostgreSQL nor the gateway's disk takes turns, and memory fills up: make room")
        return found

    def _engine_problem(self) -> str | None:
        engines = self._directory()
        if engines and all(engine.draining for engine in engines):
            return f"every engine is drained: `clawloop engine drain --undo {engines[0].id}`"
        if self._engines.healthy():
            return None
        return "no engine answers: it is starting, which takes minutes for a large model, or down; its log says which"


async def run_gateway(settings: Settings, options: GatewayOptions) -> None:
    """Serve until SIGINT or SIGTERM.

    Raises:
        SetupError: no database is configured, an engine's URL is invalid, or the gateway would listen beyond loopback
            although there is no API key.
    """
    arm_crash_points(settings.crash_points)
    await _require_usable_database(settings)
    await _require_key_beyond_loopback(settings, options.listener)
    await _add_configured_engines(settings)

    draining = asyncio.Event()

    @asynccontextmanager
    async def services() -> AsyncIterator[Services]:
        async with AsyncExitStack() as stack:
            # Here, because the server ends the process by the signal it got.
            stack.enter_context(tracing("clawloop-gateway"))
            opened = await gateway_services(stack, database_url(settings), settings, options, draining.is_set)
            _collect_less_garbage()
            yield opened

    app = create_app(services, options.allowed_hosts)
    config = server_config(app, settings)
    sockets: list[socket.socket] = []
    if options.health_port:
        health = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        health.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        health.bind(("127.0.0.1", options.health_port))
        sockets.append(health)
    await DrainingServer(config, options.listener, options.drain, draining.set).serve(sockets)


def _collect_less_garbage() -> None:
    """Exclude imported objects from garbage collection: they stay, and scanning them would pause all streams."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_OBJECTS)


def server_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """uvicorn's configuration for the application."""
    return uvicorn.Config(
        app,
        ws="none",
        http=BoundedHttpProtocol,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=CUT_SECONDS,
        # Longer than clients and proxies keep an idle connection (httpx 5 s, nginx 60 s): if the server closed it
        # first, a request sent at that moment would fail.
        timeout_keep_alive=75,
        server_header=False,
        forwarded_allow_ips=list(settings.trusted_proxies),
    )


async def gateway_services(
    stack: AsyncExitStack, url: str, settings: Settings, options: GatewayOptions, is_draining: Callable[[], bool]
) -> Services:
    """The ports of `api` on their adapters, closed with the stack."""
    sealer = sealer_of(settings.encryption_key_file)
    content = ContentCodec(sealer)
    database = Database(url, CHAT_LIMIT, content)
    stack.push_async_callback(database.close)
    background = Database(url, BACKGROUND_LIMIT, content)
    stack.push_async_callback(background.close)
    watching = Database(url, PAGE_LIMIT, content)
    stack.push_async_callback(watching.close)
    comparing = asyncio.create_task(compare_keys(background))
    stack.callback(comparing.cancel)
    metrics = GatewayMetrics()
    directory = await stack.enter_async_context(
        DirectoryCache(PostgresDirectoryStore(database).read, PostgresListener(url).changes)
    )

    def current_engines() -> Sequence[Engine]:
        return directory.snapshot.engines

    rotation = Rotation(
        current_engines,
        hold_seconds=options.hold_seconds,
        hold_limit=options.hold_limit,
        held=metrics.held,
        places=settings.engine_chats,
    )
    engines = await stack.enter_async_context(ChatEngines(rotation, current_engines, secret=engine_secret(settings)))
    metrics.engines_healthy.set_function(lambda: len(engines.healthy()))
    # Shared, so that a conversation is rebuilt once for both stores.
    conversations = ConversationCache(settings.conversation_cache_bytes)
    turns, background_turns = PostgresTurnStore(database, conversations), PostgresTurnStore(background, conversations)
    spool = Spool(settings.data / "spool", SPOOL_LIMIT_BYTES, sealer=sealer)
    stack.callback(spool.close)
    feedback = PostgresFeedbackStore(background)
    client = await _temporal_client(settings)
    temporal = await stack.enter_async_context(TemporalWatch(client))
    notifier = None if client is None else TemporalNotifier.of(client, settings)
    workers = NoTemporal() if client is None else TemporalEnvironmentWorkers(client)
    operations = Operations(background, settings, notifier or NoTemporal(), workers)
    history = await stack.enter_async_context(operations.history(lambda: directory.snapshot))
    notifications = await stack.enter_async_context(NotificationQueue(notifier, background_turns, feedback, metrics))
    recorder = await stack.enter_async_context(
        Recorder(turns, background_turns, spool, metrics, notifications, settings.when_storage_is_full)
    )
    stack.callback(crash_point, CrashPoint.GATEWAY_SHUTDOWN)
    key_store = PostgresKeyStore(database)
    keys, links = await stack.enter_async_context(KeyRing(key_store)), workflow_links(settings)
    stored = await stack.enter_async_context(StoredBytes(PostgresKeyStore(background), settings.key_stored_mib))
    readiness = GatewayReadiness(database, engines, current_engines, is_draining, lambda: recorder.is_nearly_full)
    return Services(
        links=links,
        keys=keys,
        directory=directory,
        engines=engines,
        recorder=recorder,
        notifications=notifications,
        turns=background_turns,
        files=PostgresFileStore(background),
        reading=operations.reading,
        feedback=feedback,
        training=PostgresTrainingStore(background),
        training_operations=operations.training,
        session_operations=operations.sessions,
        rollout_operations=operations.rollouts,
        voted_turns=PostgresVoteReader(background).voted_turns,
        newest_trial=PostgresTrialStore(background).newest,
        episodes=PostgresEpisodeStore(background),
        key_of_episode=PostgresEpisodeStore(background).key_of,
        artifacts=open_artifacts(settings, sealer, stack, settings.min_free_disk_bytes),
        found_by_agent=found_by_agent,
        history=history,
        engine_operations=operations.engines,
        overview=operations.overview(temporal.problem),
        key_operations=operations.keys,
        check_ledger=DatabaseCheck(background, settings.data / "adapters").report,
        logins=Logins(keys, key_store),
        training_browser=PostgresTrainingBrowser(background),
        changes=Changes(
            PostgresTrainingBrowser(watching),
            lambda: (sorted(engines.healthy()), temporal.known_problem),
        ),
        temporal_problem=temporal.problem,
        is_draining=is_draining,
        guarded_pages=frozenset(settings.guarded_pages),
        health_port=options.health_port,
        probes=PostgresProbeStore(background, conversations),
        versions=VersionChooser(turns),
        lessons=LessonChooser(turns),
        lesson_operations=LessonOperations(PostgresLessonStore(background)),
        not_ready=readiness.problems,
        metrics=metrics,
        metrics_page=GatewayPages(metrics.registry, options.name, options.health_port, options.peers).page,
        limits=options.limits,
        grammar_slots=GrammarSlots.of(options.limits.chat),
        key_limits=KeyLimiter(gateways=1 + len(options.peers), stored=stored),
        exporter=Exporter(PostgresExportStore(background)),
        want_versions=PostgresPublishingStore(background).want_for,
    )


async def _temporal_client(settings: Settings) -> Client | None:
    address = temporal_address(settings)
    if address is None:
        log.warning("no Temporal is configured: turns are stored and not judged; set TEMPORAL_ADDRESS")
        return None
    return await connect(address, lazy=True)


async def _add_configured_engines(settings: Settings) -> None:
    if not settings.engines:
        return
    database = open_database(settings)
    try:
        await add_missing_engines(database, settings.engines, installation_id(settings.data))
    except StoreUnavailable as error:  # the gateway also starts without PostgreSQL
        log.warning("CLAWLOOP_ENGINES not added", extra={"why": str(error)})
    finally:
        await database.close()


async def _require_usable_database(settings: Settings) -> None:
    """
    Raises:
        SetupError: the database has another version's schema; or what it or this gateway's disk has is encrypted with
            other keys.
    """
    database, spool = open_database(settings), settings.data / "spool"
    try:
        await database.compare_keys()
        await require_known_schema(database)
        write_mark(spool, database.content)
    except StoreUnavailable as error:  # the gateway also starts without PostgreSQL
        log.warning("schema and encryption keys not compared with PostgreSQL yet", extra={"why": str(error)})
        require_marked_keys(spool, database.content)
    finally:
        await database.close()


async def _require_key_beyond_loopback(settings: Settings, listener: socket.socket) -> None:
    if listener.family not in (socket.AF_INET, socket.AF_INET6):  # a Unix socket: the file's permissions guard it
        return
    host = listener.getsockname()[0]
    if ipaddress.ip_address(host).is_loopback:
        return
    database = open_database(settings)
    try:
        if not await PostgresKeyStore(database).any_keys():
            raise SetupError(
                f"there is no API key yet, so the gateway does not listen on {host}: "
                "run `clawloop key create` first, or listen on 127.0.0.1"
            )
    finally:
        await database.close()


# Metrics --------------------------------------------------------------------------------------------------------------
# The `/metrics` page of a gateway, with the series of the gateways that share its socket.

# A gateway on this machine answers in milliseconds; one that hangs must not fail the others' page.
_PEER_TIMEOUT = aiohttp.ClientTimeout(total=2.0)


class GatewayPages:
    """Prometheus' text of this gateway and those on the same socket.

    Args:
        name: labels each series; None: no label.
        health_port: on it the page is of this process alone; 0: it has none.
        peers: health ports of the gateways on the same socket.
    """

    def __init__(self, registry: CollectorRegistry, name: str | None, health_port: int, peers: Sequence[int]) -> None:
        self._registry = registry
        self._name = name
        self._health_port = health_port
        self._peers = peers

    async def page(self, port: int | None) -> bytes:
        """Prometheus' text format, for a request that came to this port of the gateway."""
        own = self._own_page()
        if not self._peers or port == self._health_port:
            return own
        async with aiohttp.ClientSession(timeout=_PEER_TIMEOUT) as client:
            others = await asyncio.gather(*(_page_of_peer(client, peer) for peer in self._peers))
        return merge_pages([own, *(page for page in others if page is not None)])

    def _own_page(self) -> bytes:
        if self._name is None:
            return generate_latest(self._registry)
        return page_of(LabelledRegistry(self._registry, "gateway", self._name))


async def _page_of_peer(client: aiohttp.ClientSession, port: int) -> bytes | None:
    """The metrics of another gateway; None while it does not answer, as during its restart."""
    try:
        async with client.get(f"http://127.0.0.1:{port}/metrics") as answer:
            answer.raise_for_status()
            return await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        log.info("a gateway's metrics are missing", extra={"port": port, "why": str(error)})
        return None
