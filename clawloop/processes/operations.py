"""Operators' operations on PostgreSQL, for the gateway and the command line alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from api.recording.stranded_turns import StrandedTurns
from clawloop.adapters.folder import AdapterFolder
from clawloop.contracts.sessions import ContentErased, RejudgeRequested, SessionFacts
from clawloop.contracts.training import OperatorChange
from clawloop.environments.artifacts import ArtifactFolder
from clawloop.errors import SignalFailed
from clawloop.ids import RolloutGroupId, SessionId
from clawloop.operations.ports import EnvironmentWorkers, OperatorNotifier, RolloutsNotifier, SessionWorkflows
from clawloop.operations.recovery import Recovery
from clawloop.operations.rollouts import RolloutOperations
from clawloop.operations.sessions import SessionOperations
from clawloop.operations.training import TrainingOperations
from clawloop.processes.database import sealer_of
from clawloop.processes.endpoints import page_links
from clawloop.settings import Settings
from db.database import Database
from db.episodes.rollouts import PostgresRolloutStore
from db.erasure import PostgresErasureStore
from db.judging.rejudging import PostgresRejudgeStore
from db.recovery import PostgresRecoveryStore
from db.training.operators import PostgresTrainingStore

if TYPE_CHECKING:
    from temporalio.client import Client


@dataclass(frozen=True, slots=True)
class Operations:
    training: TrainingOperations
    sessions: SessionOperations
    rollouts: RolloutOperations


class NoTemporal:
    """Stand-in for Temporal if none is configured: each call raises SignalFailed.

    Satisfies `OperatorNotifier`, `SessionWorkflows`, `RolloutsNotifier` and `EnvironmentWorkers`.
    """

    async def notify_work(self, policy: str) -> None:
        self._fail()

    async def operator_changed(self, policy: str, change: OperatorChange) -> None:
        self._fail()

    async def rollouts_changed(self, policy: str) -> None:
        self._fail()

    async def asks_for_work(self, environment: str) -> bool:
        self._fail()

    async def has_work(self, groups: Sequence[RolloutGroupId]) -> bool:
        self._fail()

    async def rejudge(self, session: SessionFacts, request: RejudgeRequested) -> None:
        self._fail()

    async def content_erased(self, session: SessionId, erased: ContentErased) -> None:
        self._fail()

    def _fail(self) -> NoReturn:
        raise SignalFailed("no Temporal is configured: set TEMPORAL_ADDRESS")


def operations_on(
    database: Database,
    settings: Settings,
    notifier: OperatorNotifier,
    workflows: SessionWorkflows,
    rollouts: RolloutsNotifier,
    workers: EnvironmentWorkers,
) -> Operations:
    artifacts = ArtifactFolder(settings.data / "artifacts", sealer_of(settings.encryption_key_file))
    return Operations(
        TrainingOperations(PostgresTrainingStore(database), notifier, settings.max_lora_rank),
        SessionOperations(PostgresRejudgeStore(database), PostgresErasureStore(database), artifacts, workflows),
        RolloutOperations(PostgresRolloutStore(database), rollouts, workers),
    )


def recovery_on(database: Database, client: Client, settings: Settings) -> Recovery:
    from clawloop.temporal.recovery import TemporalRecovery

    folder, spool = settings.data / "adapters", settings.data / "spool"
    return Recovery(
        PostgresRecoveryStore(database),
        TemporalRecovery(client, timedelta(minutes=settings.session_idle_minutes), page_links(settings)),
        AdapterFolder(folder) if folder.is_dir() else None,
        StrandedTurns(spool, sealer_of(settings.encryption_key_file)) if spool.is_dir() else None,
    )
