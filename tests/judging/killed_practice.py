"""A program for test_practice.py: a worker that dies as it practises, as by `kill -9`.

`python -m tests.judging.killed_practice DATABASE_URL WHEN`: once the engine has `answered` its second request, in the
transaction that is `inserting` the turn, or when turn and sample are `kept`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from activities.notify import TrainingNotifier
from activities.practice import PracticeActivities, Practise
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.lessons.practice import Practice, PracticeResult
from db.database import BACKGROUND_LIMIT, Database
from db.lessons.practice import PostgresPracticeStore
from db.training.work_flag import PostgresWorkStore
from tests.fakes.notifier import FakeNotifier
from tests.judging.test_practice import ScriptedEngine


class DyingStore(PostgresPracticeStore):
    def __init__(self, database: Database, when: str) -> None:
        super().__init__(database)
        self._when = when
        self._requests = 0

    async def keep(self, practice: Practice, result: PracticeResult) -> str | None:
        self._requests += 1
        self._die_when("answered")
        ready = await super().keep(practice, result)
        self._die_when("kept")
        return ready

    async def _insert_turn(self, connection: AsyncConnection, record: TurnRecord, source: Any) -> None:
        await super()._insert_turn(connection, record, source)
        self._die_when("inserting")

    def _die_when(self, moment: str) -> None:
        if self._requests == 2 and moment == self._when:
            os.kill(os.getpid(), signal.SIGKILL)


async def practise(database_url: str, when: str) -> None:
    database, engine = Database(database_url, BACKGROUND_LIMIT), ScriptedEngine()
    training = TrainingNotifier(PostgresWorkStore(database), FakeNotifier())
    practice = PracticeActivities(DyingStore(database, when), engine.answer, engine.render, training)
    await practice.practise(Practise(policy="default"))


if __name__ == "__main__":
    asyncio.run(practise(sys.argv[1], sys.argv[2]))
