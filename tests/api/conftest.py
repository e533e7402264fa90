"""A gateway with fake stores and engines, served over real HTTP so that streaming is real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from starlette.datastructures import Headers

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
from clawloop.app.processes.gateway import GatewayPages
from clawloop.core.contracts.serving import ApiKey, Directory, Engine, Policy, Scope
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.settings import WhenStorageIsFull
from clawloop.core.telemetry.metrics import GatewayMetrics
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.operations.engines import EngineOperations
from clawloop.operations.export import Exporter
from clawloop.operations.history import HistoryOperations, HistoryTurn
from clawloop.operations.keys import KeyOperations
from clawloop.operations.lessons import LessonOperations
from clawloop.operations.overview import Overview
from clawloop.operations.reading import Reading
from clawloop.operations.rollouts import RolloutOperations
from clawloop.operations.sessions import SessionOperations
from clawloop.operations.training import TrainingOperations
from clawloop.serving.chat import ChatEngines
from clawloop.serving.directory import DirectoryCache
from clawloop.serving.engine_secret import Secret, no_secret
from clawloop.serving.rotation import Rotation
from db.serving.directory import DEFAULT_SAMPLING
from tests.fakes.admin import (
    FakeEngineProbe,
    FakeEngineStore,
    FakeExportStore,
    FakeOverviewStore,
    FakeProbeStore,
    FakeVoteReader,
    check_ledger,
)
from tests.fakes.away_browser import AwayBrowser
from tests.fakes.directory_store import FakeDirectoryStore
from tests.fakes.engine import FakeEngine, fake_engine, serving
from tests.fakes.erasure_store import FakeErasureStore
from tests.fakes.history_store import FakeHistoryJudge, FakeHistoryStore
from tests.fakes.key_store import FakeKeyStore
from tests.fakes.ledger import FakeLedger
from tests.fakes.lesson_store import FakeLessonStore
from tests.fakes.notifier import FakeNotifier
from tests.fakes.rollouts_store import FakeEpisodeKeys, FakeEpisodeReader, FakeRolloutsStore
from tests.fakes.session_store import FakeSessionStore
from tests.fakes.training_store import FakeTrainingStore
from tests.fakes.turn_store import FakeTurnStore


@dataclass
class Gateway:
    url: str
    turns: FakeTurnStore
    sessions: FakeSessionStore
    keys: FakeKeyStore
    directory: FakeDirectoryStore
    engines: list[FakeEngine]
    services: Services
    spool: Spool
    key: str
    admin_key: str
    ledger: FakeLedger
    operator: FakeNotifier
    rollouts: FakeRolloutsStore
    episodes: FakeEpisodeReader
    stored: StoredBytes
    episode_keys: FakeEpisodeKeys

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    def client(self, key: str | None = None) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {key or self.key}"}, timeout=120)

    def openai(self, **options: object) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=120)

    async def only_key(self) -> ApiKey:
        """The key of `client()`."""
        return await self.services.keys.require(Headers({"authorization": f"Bearer {self.key}"}), Scope.CHAT)

    async def recorded(self, count: int = 1) -> list[TurnRecord]:
        """The stored turns in the order of their requests, once there are `count`.

        A turn is stored shortly after its client disconnects, on a busy machine by the disk and so after a later one.
        """
        await until(lambda: len(self.turns.records) >= count)
        return sorted(self.turns.records, key=lambda record: record.turn_id)


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running_gateway(
    folder: Path,
    *,
    engines: Sequence[FakeEngine],
    limits: Limits | None = None,
    hold_seconds: float = 5.0,
    places: int | None = None,
    place_seconds: float = 30.0,
    grammar_seconds: float = 0.2,
    secret: Secret = no_secret,
    active: int = 0,
    versions: frozenset[int] = frozenset(),
    unloaded: frozenset[int] = frozenset(),
    spool_bytes: int = 10**8,
    held_bytes: int = 10**8,
    when_full: WhenStorageIsFull = WhenStorageIsFull.ANSWER,
    notifier: FakeNotifier | None = None,
    history: Sequence[HistoryTurn] = (),
) -> AsyncIterator[Gateway]:
    turns, keys = FakeTurnStore(), FakeKeyStore()
    sessions = FakeSessionStore(turns)
    ledger, operator = FakeLedger(), FakeNotifier()
    ledger.add_policy("default", Recipe(name="combined"))
    kept = versions | unloaded
    policy = Policy("default", "tiny", ("qwen3-4b",), active, dict(DEFAULT_SAMPLING), kept=kept)
    rows = tuple(Engine(f"e{n}", engine.url, {"default": versions}, False) for n, engine in enumerate(engines))
    directory = FakeDirectoryStore(Directory((policy,), rows))

    async def load(policy: str, wanted: Sequence[int], how_long: timedelta) -> None:
        have = versions | (unloaded & set(wanted))
        directory.set_engines([replace(row, versions={policy: have}) for row in rows])

    key = keys.add("default", frozenset({Scope.CHAT}))
    admin_key = keys.add("default", frozenset({Scope.ADMIN}))
    spool = Spool(folder / "spool", spool_bytes)
    metrics, training = GatewayMetrics(), FakeTrainingStore(ledger)
    rollouts, episodes, episode_keys = FakeRolloutsStore(), FakeEpisodeReader(), FakeEpisodeKeys()
    rollout_operations = RolloutOperations(rollouts, operator, rollouts)
    created: list[Services] = []
    counts: list[StoredBytes] = []

    @asynccontextmanager
    async def services() -> AsyncIterator[Services]:
        async with AsyncExitStack() as stack:
            stack.callback(spool.close)
            cache = await stack.enter_async_context(DirectoryCache(directory.read))
            rotation = Rotation(
                lambda: cache.snapshot.engines,
                hold_seconds=hold_seconds,
                hold_limit=2,
                held=metrics.held,
                places=places,
                place_seconds=place_seconds,
            )
            chat_engines = await stack.enter_async_context(
                ChatEngines(rotation, lambda: cache.snapshot.engines, probe_seconds=0.05, secret=secret)
            )
            notifications = await stack.enter_async_context(NotificationQueue(notifier, turns, sessions, metrics))
            recorder = await stack.enter_async_context(
                Recorder(turns, turns, spool, metrics, notifications, when_full, held_bytes)
            )
            stored = await stack.enter_async_context(StoredBytes(keys))
            counts.append(stored)
            key_ring, browser = KeyRing(keys, retry_seconds=0), AwayBrowser()
            artifacts = ArtifactFolder(folder / "artifacts")
            operations = SessionOperations(
                sessions, FakeErasureStore(turns), artifacts.delete, notifier or FakeNotifier()
            )
            engine_operations = EngineOperations(FakeEngineStore(directory), FakeEngineProbe())
            created.append(
                Services(
                    keys=key_ring,
                    directory=cache,
                    engines=chat_engines,
                    recorder=recorder,
                    notifications=notifications,
                    turns=turns,
                    files=turns,
                    reading=Reading(sessions),
                    feedback=sessions,
                    training=training,
                    training_operations=TrainingOperations(training, operator, max_lora_rank=16),
                    session_operations=operations,
                    rollout_operations=rollout_operations,
                    episodes=episodes,
                    voted_turns=FakeVoteReader().voted_turns,
                    newest_trial=FakeVoteReader().newest_trial,
                    key_of_episode=episode_keys.key_of,
                    artifacts=artifacts,
                    found_by_agent=lambda environment, task: None,
                    history=HistoryOperations(FakeHistoryStore(history), FakeHistoryJudge(), training, operations),
                    logins=Logins(key_ring, keys),
                    training_browser=browser,
                    changes=Changes(browser),
                    probes=FakeProbeStore(),
                    engine_operations=engine_operations,
                    overview=Overview(
                        FakeOverviewStore(turns).counts,
                        engine_operations,
                        training,
                        temporal_answers,
                        rollout_operations,
                    ),
                    temporal_problem=temporal_answers,
                    key_operations=KeyOperations(keys),
                    check_ledger=check_ledger,
                    lessons=LessonChooser(turns),
                    lesson_operations=LessonOperations(FakeLessonStore(turns)),
                    versions=VersionChooser(turns),
                    not_ready=always_ready,
                    metrics=metrics,
                    metrics_page=GatewayPages(metrics.registry, None, 0, ()).page,
                    limits=limits or Limits(),
                    grammar_slots=GrammarSlots.of((limits or Limits()).chat, wait_seconds=grammar_seconds),
                    key_limits=KeyLimiter(stored=stored),
                    exporter=Exporter(FakeExportStore(turns)),
                    want_versions=load,
                )
            )
            yield created[0]

    async with serving(create_app(services), http=BoundedHttpProtocol) as url:
        if any(engine.healthy for engine in engines):
            # It is asked what its model takes first, and only two requests may wait for that.
            await until(created[0].engines.healthy)
        yield Gateway(
            url,
            turns,
            sessions,
            keys,
            directory,
            list(engines),
            created[0],
            spool,
            key,
            admin_key,
            ledger,
            operator,
            rollouts,
            episodes,
            counts[0],
            episode_keys,
        )


async def temporal_answers() -> str | None:
    return None


async def always_ready() -> list[str]:
    return []


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with fake_engine() as running:
        yield running


@pytest.fixture(scope="module")
async def shared_gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    async with fake_engine() as engine, running_gateway(folder, engines=[engine]) as running:
        yield running


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    """A shared gateway, for tests that leave it healthy: starting one takes a fifth of a second."""
    shared_gateway.turns.records.clear()
    shared_gateway.engine.reset()
    return shared_gateway


@pytest.fixture
async def fresh_gateway(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway for one test, which may break it."""
    async with running_gateway(tmp_path, engines=[engine]) as running:
        yield running
