"""Operators' operations, put together for the gateway and the command line alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import aiohttp

from clawloop.app.processes.database import sealer_of
from clawloop.app.processes.endpoints import engine_secret, workflow_links
from clawloop.core.adapters.directory import check_version
from clawloop.core.contracts.answers import Broken, CheckReport
from clawloop.core.contracts.notices import Notice, Notifier
from clawloop.core.contracts.serving import Directory, Engine
from clawloop.core.contracts.training import VersionRef
from clawloop.core.errors import AdapterUnreadable, AdapterUnusable, EngineUnavailable, SetupError, SignalFailed
from clawloop.core.ids import RolloutGroupId, TurnId
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.settings import Settings
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.operations.engines import EngineOperations
from clawloop.operations.history import HistoryOperations, NewVerdict
from clawloop.operations.keys import KeyOperations
from clawloop.operations.overview import Overview
from clawloop.operations.reading import Reading
from clawloop.operations.rollouts import EnvironmentWorkers, RolloutOperations
from clawloop.operations.sessions import SessionOperations
from clawloop.operations.training import TrainingOperations
from clawloop.serving import engine_check
from db.database import Database
from db.encryption.rotation import audit
from db.episodes.rollouts import PostgresRolloutStore
from db.erasure import PostgresErasureStore
from db.invariants import INVARIANTS, committed_versions, violations
from db.judging.judgements import PostgresJudgementStore
from db.judging.rejudging import PostgresHistoryStore, PostgresRejudgeStore
from db.overview import PostgresOverviewStore
from db.serving import engines
from db.serving.directory import PostgresDirectoryStore
from db.serving.keys import PostgresKeyStore
from db.training.operators import PostgresTrainingStore
from db.turns.files import PostgresFileStore
from db.turns.sessions import PostgresSessionStore

if TYPE_CHECKING:
    from activities.judging.history_judge import StoredTurnJudge
    from clawloop.core.judging.phrases import Phrase
    from clawloop.core.judging.prompts import AnswerForm
    from clawloop.core.judging.quality import JudgeTrial


# Engines and models ---------------------------------------------------------------------------------------------------
# Compares engines with the policies of a database, and with the trainer's model where its folder is here.


async def check_engines(
    database: Database, urls: Sequence[str], model: Path | None, secret: str | None = None
) -> list[str]:
    """
    Args:
        model: CLAWLOOP_MODEL.
        secret: of the engines; None: they have none.

    Returns:
        A line for each engine that does not answer yet, and so is not compared.

    Raises:
        SetupError: an engine serves another model.
        StoreUnavailable
    """
    base_models = {policy.base_model for policy in (await PostgresDirectoryStore(database).read()).policies}
    silent = []
    for url in urls:
        try:
            await engine_check.require_model(url.strip().rstrip("/"), base_models, _vocabulary(model), secret)
        except EngineUnavailable as error:
            silent.append(f"{error} yet; its model was not compared.")
    return silent


def _vocabulary(model: Path | None) -> int | None:
    """Token ids of the model in this folder; None if it is not on this machine."""
    config = None if model is None else model / "config.json"
    if config is None or not config.is_file():
        return None
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
        return int({**content, **content.get("text_config", {})}["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(f"CLAWLOOP_MODEL: {config} does not describe a language model") from error


# Engines --------------------------------------------------------------------------------------------------------------
# Operators' operations on engines, put together for the gateway and the command line alike.

# A person waits; an engine that computes answers this within milliseconds.
_HEALTH_SECONDS = 3.0


class PostgresEngineStore:
    """Satisfies `clawloop.operations.engines.EngineStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def engines(self) -> list[Engine]:
        return await engines.list_engines(self._database)

    async def add(self, url: str) -> Engine:
        return await engines.add_engine(self._database, url)

    async def set_draining(self, engine_id: str, draining: bool) -> None:
        await engines.drain_engine(self._database, engine_id, draining)

    async def remove(self, engine_id: str) -> None:
        await engines.remove_engine(self._database, engine_id)


class HttpEngineProbe:
    """Satisfies `clawloop.operations.engines.EngineProbe`."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    async def healthy(self, engine: Engine) -> bool:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_SECONDS)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                async with session.get(f"{engine.url}/health") as answer:
                    return answer.status == 200
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False

    async def check(self, url: str) -> list[str]:
        address = engines.engine_of(url)[1]
        secret = engine_secret(self._settings)()
        return await check_engines(self._database, [address], self._settings.model_folder, secret)

    async def answers_strangers(self, url: str) -> bool:
        return await engine_check.answers_strangers(engines.engine_of(url)[1])


# The ledger -----------------------------------------------------------------------------------------------------------
# Verifies a database's ledger and the adapters in a data folder.

FILES = "a committed version's files hold what its step made"
ENCRYPTED = "content of an encrypted database is encrypted"
READABLE = "encrypted content can be decrypted"


class DatabaseCheck:
    """The check of a database's ledger, and of a data folder's adapters.

    Args:
        adapters: the data folder's `adapters`.
    """

    def __init__(self, database: Database, adapters: Path) -> None:
        self._database = database
        self._adapters = adapters

    async def report(self, files: bool) -> CheckReport:
        """A report of the broken invariants.

        Args:
            files: also compare the adapters' files with their hash.

        Raises:
            StoreUnavailable
        """
        found = [Broken(invariant=one.invariant, row=one.row) for one in await violations(self._database)]
        found += await self._encryption(decrypt=files)
        versions = await committed_versions(self._database) if files else []
        found += await asyncio.to_thread(damaged_files, versions, self._adapters)
        return CheckReport(
            invariants=len(INVARIANTS) + 2 * self._database.content.is_on, adapters=len(versions), violations=found
        )

    async def _encryption(self, *, decrypt: bool) -> list[Broken]:
        found = await audit(self._database, decrypt=decrypt)
        plain = [
            f"{rows} rows of {table} are plain: `clawloop encryption rotate`" for table, rows in found.plain.items()
        ]
        return [Broken(invariant=ENCRYPTED, row=row) for row in plain] + [
            Broken(invariant=READABLE, row=row) for row in found.unreadable
        ]


def damaged_files(versions: Sequence[VersionRef], folder: Path) -> list[Broken]:
    """One for each version whose files are missing or have another hash.

    Args:
        folder: the data folder's `adapters`.
    """
    damaged: list[Broken] = []
    for version in versions:
        try:
            check_version(folder / version.path, version.sha256)
        except (AdapterUnusable, AdapterUnreadable) as error:
            damaged.append(Broken(invariant=FILES, row=str(error)))
    return damaged


# Another judge --------------------------------------------------------------------------------------------------------
# Comparing stored turns' verdicts with another judge's, put together for the gateway and the command line.

# The judge of these settings where CLAWLOOP_JUDGE_URL names no other one.
BASE_MODEL = "base model"
NOTHING_FOLLOWS = "nothing follows it any more"


class _NamedJudge:
    """Satisfies `clawloop.operations.history.HistoryJudge`."""

    def __init__(self, name: str, judge: StoredTurnJudge) -> None:
        self._name = name
        self._judge = judge

    @property
    def name(self) -> str:
        return self._name

    async def verdict(self, turn_id: TurnId, recipe: Recipe) -> NewVerdict:
        found = await self._judge.verdict(turn_id, recipe)
        return NewVerdict(None, NOTHING_FOLLOWS) if found is None else NewVerdict(found.verdict, found.why)


# All of them ----------------------------------------------------------------------------------------------------------


class NoTemporal:
    """Satisfies `Notifier` and `EnvironmentWorkers` where no Temporal is configured."""

    async def notify(self, notice: Notice) -> None:
        self._fail()

    async def asks_for_work(self, environment: str) -> bool:
        self._fail()

    async def has_work(self, groups: Sequence[RolloutGroupId]) -> bool:
        self._fail()

    def _fail(self) -> NoReturn:
        raise SignalFailed("no Temporal is configured: set TEMPORAL_ADDRESS")


class Operations:
    """Operators' operations on one database, for the gateway and the command line; each is made when it is asked for.

    Args:
        settings: of the machine that they run on.
    """

    def __init__(self, database: Database, settings: Settings, notifier: Notifier, workers: EnvironmentWorkers) -> None:
        self._database = database
        self._settings = settings
        self._notifier = notifier
        self._workers = workers

    @cached_property
    def reading(self) -> Reading:
        return Reading(PostgresSessionStore(self._database), workflow_links(self._settings))

    @cached_property
    def keys(self) -> KeyOperations:
        return KeyOperations(PostgresKeyStore(self._database))

    @cached_property
    def engines(self) -> EngineOperations:
        return EngineOperations(PostgresEngineStore(self._database), HttpEngineProbe(self._database, self._settings))

    @cached_property
    def training(self) -> TrainingOperations:
        return TrainingOperations(PostgresTrainingStore(self._database), self._notifier, self._settings.max_lora_rank)

    @cached_property
    def sessions(self) -> SessionOperations:
        artifacts = ArtifactFolder(self._settings.data / "artifacts", sealer_of(self._settings.encryption_key_file))
        rejudging, erasure = PostgresRejudgeStore(self._database), PostgresErasureStore(self._database)
        return SessionOperations(rejudging, erasure, artifacts.delete, self._notifier)

    @cached_property
    def rollouts(self) -> RolloutOperations:
        return RolloutOperations(PostgresRolloutStore(self._database), self._notifier, self._workers)

    async def directory(self) -> Directory:
        """The policies and engines now.

        Raises:
            StoreUnavailable
        """
        return await PostgresDirectoryStore(self._database).read()

    def overview(self, temporal_problem: Callable[[], Awaitable[str | None]]) -> Overview:
        """
        Args:
            temporal_problem: why Temporal does not answer; None: it does.
        """
        return Overview(
            PostgresOverviewStore(self._database).counts,
            self.engines,
            PostgresTrainingStore(self._database),
            temporal_problem,
            self.rollouts,
            workflow_links(self._settings),
        )

    async def try_judge(
        self, policy: str, own: Sequence[Phrase] | None = None, report: Callable[[str], None] = lambda line: None
    ) -> tuple[JudgeTrial, AnswerForm | None]:
        """Try the settings' judge on labelled phrases, and keep the result for the judge workers; on an operator's own
        phrases it is not kept. Returns it with the form that the settings prescribe, if they do: then no trial counts.

        Raises:
            SetupError: CLAWLOOP_JUDGE_URL is set, CLAWLOOP_JUDGE_MODEL is not.
            JudgeUnavailable, JudgeRefused: the judge answers nothing.
        """
        from clawloop.app.processes.workers import judge_client, judge_form
        from clawloop.operations.judge_trial import try_judge
        from db.judging.trials import PostgresTrialStore

        directory = await self.directory()
        async with judge_client(self._settings, lambda: directory) as judge:
            trial = await try_judge(judge, policy, own, report)
        if own is None:
            await PostgresTrialStore(self._database).keep(trial)
        return trial, judge_form(self._settings)

    @asynccontextmanager
    async def history(self, directory: Callable[[], Directory]) -> AsyncIterator[HistoryOperations]:
        """Operations that compare stored turns' verdicts with the verdicts of the settings' judge.

        Args:
            directory: the current policies and engines.

        Raises:
            SetupError: CLAWLOOP_JUDGE_URL is set, CLAWLOOP_JUDGE_MODEL is not.
        """
        from activities.judging.history_judge import StoredTurnJudge
        from clawloop.app.processes.workers import judge_client
        from db.judging.trials import PostgresTrialStore

        settings, database = self._settings, self._database
        name = BASE_MODEL if settings.judge_url is None else f"{settings.judge_model} at {settings.judge_url}"
        pictures, trials = PostgresFileStore(database).of_turn, PostgresTrialStore(database).trial
        async with judge_client(settings, directory, pictures=pictures, trials=trials) as client:
            judge = _NamedJudge(name, StoredTurnJudge(PostgresJudgementStore(database), client))
            training = PostgresTrainingStore(database)
            yield HistoryOperations(PostgresHistoryStore(database), judge, training, self.sessions)
