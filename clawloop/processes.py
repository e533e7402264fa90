"""Where ports meet adapters: each process of Clawloop is put together here and nowhere else."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import uvicorn

from api.announcing import Announcements
from api.app import create_app
from api.auth import KeyRing
from api.dependencies import Limits, Services
from api.directory import DirectoryCache
from api.ports import Operations
from api.recording import Recorder
from api.spool import Spool
from api.versions import VersionChooser
from clawloop.contracts import Engine, Scope
from clawloop.errors import SetupError, StoreUnavailable
from clawloop.recipe import Recipe
from clawloop.recipe_checks import require_rank
from clawloop.running import installation, read_running
from clawloop.serving.chat import ChatEngines
from clawloop.serving.rotation import Rotation
from clawloop.settings import Settings
from clawloop.telemetry import GatewayMetrics
from clawloop.temporal import SessionsWithoutTemporal, TemporalAnnouncer, connect
from clawloop.temporal_training import TemporalTraining, WithoutTemporal
from db.chains import Chains
from db.engine import BACKGROUND_LIMIT, CHAT_LIMIT, Database
from db.erasure import PostgresErasureStore
from db.feedback import PostgresFeedbackStore
from db.judged_so_far import PostgresJudgedSoFar
from db.keys import PostgresKeyStore
from db.notices import PostgresNotices
from db.operators import PostgresTrainingStore
from db.policies import PostgresDirectoryStore, ensure_policy
from db.recipes import ensure_recipe, read_recipe_of, set_recipe
from db.schema import is_current, migrate
from db.serving_engines import add_engine, add_missing_engines, ensure_engines
from db.sessions import PostgresSessionStore
from db.turns import PostgresTurnStore

log = logging.getLogger(__name__)

DEFAULT_POLICY = "default"
DEFAULT_RECIPE = Recipe(name="combined")
"""The same as deploy/recipes/combined.toml; what a new policy learns by."""

# A vLLM engine takes 45-75 s to restart on two cores; OpenClaw retries a 503 with a rewritten message, so hold.
HOLD_SECONDS = 150.0
# A server that listens takes a connection at once; a far one within some tenths of a second.
TEMPORAL_LOOK_SECONDS = 2.0
# Held requests keep their bodies in memory: 256 of OpenClaw's 35 KB are nothing, 256 of 32 MiB are not the habit.
HOLD_LIMIT = 256
# About 3,000 turns of a 32k-token conversation: a day without Postgres for one busy person.
SPOOL_LIMIT_BYTES = 1024**3


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """How one gateway is started."""

    host: str
    port: int
    allowed_hosts: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    hold_seconds: float = HOLD_SECONDS
    hold_limit: int = HOLD_LIMIT


class GatewayReadiness:
    """Satisfies `api.ports.Readiness`: Postgres at our schema, and an engine that answers."""

    def __init__(self, database: Database, engines: ChatEngines) -> None:
        self._database = database
        self._engines = engines

    async def problems(self) -> list[str]:
        found: list[str] = []
        try:
            if not await is_current(self._database):
                found.append("the database schema is not this version's: run `clawloop migrate`")
        except StoreUnavailable as error:
            # The reason names hosts and users; whoever may read the log may read it.
            log.warning("not ready", extra={"why": str(error)})
            found.append("PostgreSQL does not answer; the log says why")
        if not self._engines.healthy():
            found.append("no engine is healthy")
        return found


async def run_gateway(settings: Settings, options: GatewayOptions) -> None:
    """Serve until asked to stop.

    Raises:
        SetupError: no database is given, an engine's address is none, or it would listen beyond loopback without
            a key.
    """
    url = database_url(settings)
    await _refuse_open_door(url, options)
    await _add_given_engines(url, settings)

    @asynccontextmanager
    async def services() -> AsyncIterator[Services]:
        async with AsyncExitStack() as stack:
            yield await _gateway_services(stack, url, settings, options)

    app = create_app(services, options.allowed_hosts)
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
        log_config=None,
        access_log=False,
        # `clawloop up` gives the gateway 4 s to end: streams still open after this are cut and recorded as aborted.
        timeout_graceful_shutdown=2,
        # Longer than clients and proxies keep an idle connection (httpx 5 s, nginx 60 s): who ends it first must be the
        # one that sends, or now and then a request meets a connection that is just being closed, and fails.
        timeout_keep_alive=75,
        server_header=False,
    )
    await uvicorn.Server(config).serve()


async def _gateway_services(stack: AsyncExitStack, url: str, settings: Settings, options: GatewayOptions) -> Services:
    database = Database(url, CHAT_LIMIT)
    stack.push_async_callback(database.close)
    patient = Database(url, BACKGROUND_LIMIT)
    stack.push_async_callback(patient.close)
    metrics = GatewayMetrics()
    directory = await stack.enter_async_context(DirectoryCache(PostgresDirectoryStore(database), PostgresNotices(url)))

    def known_engines() -> Sequence[Engine]:
        return directory.now.engines

    rotation = Rotation(
        known_engines, hold_seconds=options.hold_seconds, hold_limit=options.hold_limit, held=metrics.held
    )
    engines = await stack.enter_async_context(ChatEngines(rotation, known_engines))
    metrics.engines_healthy.set_function(lambda: len(engines.healthy()))
    # What one store has rebuilt of a conversation, the other need not rebuild.
    chains = Chains()
    turns, patient_turns = PostgresTurnStore(database, chains), PostgresTurnStore(patient, chains)
    spool = Spool(settings.data / "spool", SPOOL_LIMIT_BYTES)
    stack.callback(spool.close)
    feedback = PostgresFeedbackStore(patient)
    announcer, operations = await _telling(settings)
    announcements = await stack.enter_async_context(Announcements(announcer, patient_turns, feedback, metrics))
    recorder = await stack.enter_async_context(Recorder(turns, patient_turns, spool, metrics, announcements))
    return Services(
        keys=KeyRing(PostgresKeyStore(database)),
        directory=directory,
        engines=engines,
        recorder=recorder,
        announcements=announcements,
        sessions=PostgresSessionStore(patient),
        feedback=feedback,
        training=PostgresTrainingStore(patient),
        operations=operations,
        judged=PostgresJudgedSoFar(patient),
        erasures=PostgresErasureStore(patient),
        session_operations=announcer or SessionsWithoutTemporal(),
        versions=VersionChooser(turns),
        readiness=GatewayReadiness(database, engines),
        metrics=metrics,
        limits=options.limits,
    )


async def _telling(settings: Settings) -> tuple[TemporalAnnouncer | None, Operations]:
    address = temporal_address(settings)
    if address is None:
        log.warning("no Temporal is given: turns are stored and wait, set TEMPORAL_ADDRESS")
        return None, WithoutTemporal("no Temporal is given: set TEMPORAL_ADDRESS")
    client = await connect(address, lazy=True)
    return TemporalAnnouncer(client, timedelta(minutes=settings.session_idle_minutes)), TemporalTraining(client)


async def operations(settings: Settings) -> Operations:
    """What tells training workflows what an operator said, for a program that ends at once.

    Temporal's client cannot be made where nothing listens: a thread of its own goes on trying while Python ends, which
    ends in a crash.
    """
    address = temporal_address(settings)
    if address is None:
        return WithoutTemporal("no Temporal is given: set TEMPORAL_ADDRESS")
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(TEMPORAL_LOOK_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError, ValueError):
        return WithoutTemporal(f"Temporal does not answer at {address}")
    writer.close()
    return TemporalTraining(await connect(address, lazy=True))


async def prepare(
    url: str,
    base_model: str,
    aliases: Sequence[str],
    engines: Sequence[str],
    secrets: Mapping[str, str],
    added_by: str = "clawloop up",
    recipe: Recipe | None = None,
    max_lora_rank: int = 16,
) -> dict[str, str]:
    """Bring a database to the state a gateway needs: schema, default policy and recipe, engines, a key of each scope.

    Args:
        base_model: the name under which the engines serve version 0.
        aliases: further names for `policy`.
        engines: URLs; of the engines that `added_by` added exactly these stay.
        secrets: keys by scope that earlier starts made.
        added_by: the installation, where several share the database.
        recipe: what the default policy learns by from now on; None: as before.
        max_lora_rank: of the adapters that engines take.

    Returns:
        A good key for each scope: the given one where it still is, else a new one.

    Raises:
        SetupError, StoreUnavailable
        RecipeRejected: no engine could load, or no trainer compute, what this recipe makes.
    """
    await asyncio.to_thread(migrate, url)
    database = Database(url, BACKGROUND_LIMIT)
    try:
        await ensure_policy(database, DEFAULT_POLICY, base_model, aliases)
        await ensure_recipe(database, DEFAULT_POLICY, DEFAULT_RECIPE)
        require_rank(recipe or await read_recipe_of(database, DEFAULT_POLICY), max_lora_rank)
        if recipe is not None:
            await set_recipe(database, DEFAULT_POLICY, recipe)
        await ensure_engines(database, engines, added_by)
        return {scope: await _ensure_key(PostgresKeyStore(database), scope, secrets.get(scope)) for scope in Scope}
    finally:
        await database.close()


async def _ensure_key(store: PostgresKeyStore, scope: Scope, secret: str | None) -> str:
    if secret is not None and await store.authenticate(secret) is not None:
        return secret
    _, made = await store.create_key(DEFAULT_POLICY, frozenset({scope}), name=f"made by clawloop up for {scope}")
    return made


async def begin(url: str, base_model: str, aliases: Sequence[str], engines: Sequence[str]) -> None:
    """Make the default policy with its recipe, and engines, so that a deployment without `up` can begin.

    Raises:
        SetupError, StoreUnavailable
    """
    database = Database(url, BACKGROUND_LIMIT)
    try:
        await ensure_policy(database, DEFAULT_POLICY, base_model, aliases)
        await ensure_recipe(database, DEFAULT_POLICY, DEFAULT_RECIPE)
        for engine in engines:
            await add_engine(database, engine)
    finally:
        await database.close()


async def _add_given_engines(url: str, settings: Settings) -> None:
    if not settings.engines:
        return
    database = Database(url, BACKGROUND_LIMIT)
    try:
        await add_missing_engines(database, settings.engines, installation(settings.data))
    except StoreUnavailable as error:  # a gateway starts without PostgreSQL, too
        log.warning("CLAWLOOP_ENGINES not added", extra={"why": str(error)})
    finally:
        await database.close()


async def _refuse_open_door(url: str, options: GatewayOptions) -> None:
    if options.host == "localhost" or _is_loopback(options.host):
        return
    database = Database(url, BACKGROUND_LIMIT)
    try:
        if not await PostgresKeyStore(database).any_keys():
            raise SetupError(
                f"there is no API key yet, so the gateway does not listen on {options.host}: "
                "run `clawloop key create` first, or listen on 127.0.0.1"
            )
    finally:
        await database.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def database_url(settings: Settings) -> str:
    """The database this command is about: the one given, or that of the `clawloop up` that runs on this data.

    Raises:
        SetupError: neither is there.
    """
    if settings.database_url is not None:
        return settings.database_url
    running = read_running(settings.data)
    if running is None:
        raise SetupError(
            f"no database: set DATABASE_URL, or start `clawloop up --data {settings.data}` in another terminal"
        )
    return running.database_url


def temporal_address(settings: Settings) -> str | None:
    """The Temporal this command is about: the one given, or that of the `clawloop up` that runs on this data."""
    if settings.temporal_address is not None:
        return settings.temporal_address
    running = read_running(settings.data)
    return None if running is None else running.temporal_address
