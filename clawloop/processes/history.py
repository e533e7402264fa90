"""Comparing stored turns' verdicts with another judge's, put together for the gateway and the command line."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from activities.judging.history import StoredTurnJudge
from clawloop.contracts.serving import Directory
from clawloop.ids import TurnId
from clawloop.operations.history import HistoryOperations, NewVerdict
from clawloop.operations.sessions import SessionOperations
from clawloop.processes.judge import judge_client
from clawloop.recipes.recipe import Recipe
from clawloop.settings import Settings
from db.database import Database
from db.judging.history import PostgresHistoryStore
from db.judging.judgements import PostgresJudgementStore
from db.training.operators import PostgresTrainingStore
from db.turns.files import PostgresFileStore

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


@asynccontextmanager
async def history_on(
    database: Database, settings: Settings, directory: Callable[[], Directory], sessions: SessionOperations
) -> AsyncIterator[HistoryOperations]:
    """
    Args:
        directory: the current policies and engines.

    Raises:
        SetupError: CLAWLOOP_JUDGE_URL is set, CLAWLOOP_JUDGE_MODEL is not.
    """
    name = BASE_MODEL if settings.judge_url is None else f"{settings.judge_model} at {settings.judge_url}"
    async with judge_client(settings, directory, pictures=PostgresFileStore(database)) as client:
        judge = _NamedJudge(name, StoredTurnJudge(PostgresJudgementStore(database), client))
        yield HistoryOperations(PostgresHistoryStore(database), judge, PostgresTrainingStore(database), sessions)
