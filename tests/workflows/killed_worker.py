"""A program for test_killed_worker.py: a judge worker that dies between storing the votes and deciding by them.

`python killed_worker.py TEMPORAL_ADDRESS DATABASE_URL JUDGE_URL MARK`; it dies only where MARK does not exist yet.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from temporalio.worker import Worker

from activities.judging.judge_turn import JudgingActivities
from activities.notify import TrainingNotifier
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.core.ids import JudgementId
from clawloop.core.judging.prompts import AnswerForm, JudgeReply
from clawloop.core.judging.records import StoredAnswers, StoredVote
from clawloop.serving.endpoints import Endpoint
from clawloop.serving.judge import JudgeClient
from clawloop.serving.rendering import EngineRenderer
from db.database import BACKGROUND_LIMIT, Database
from db.judging.judgements import PostgresJudgementStore
from db.training.work_flag import PostgresWorkStore
from tests.workflows.conftest import IDLE
from workflows import names


class DyingStore(PostgresJudgementStore):
    def __init__(self, database: Database, mark: Path) -> None:
        super().__init__(database)
        self._mark = mark

    async def store_votes(
        self, judgement: JudgementId, votes: Sequence[StoredVote], replies: Mapping[int, JudgeReply] | None = None
    ) -> StoredAnswers:
        stored = await super().store_votes(judgement, votes, replies)
        if not self._mark.exists():
            self._mark.write_text("died")
            os.kill(os.getpid(), signal.SIGKILL)
        return stored


async def work(address: str, database_url: str, judge_url: str, mark: Path) -> None:
    client = await connect(address)
    database = Database(database_url, BACKGROUND_LIMIT)
    store = DyingStore(database, mark)
    notifier = TrainingNotifier(PostgresWorkStore(database), TemporalNotifier(client, IDLE))

    def endpoints(policy: str) -> list[Endpoint]:
        return [Endpoint(judge_url, "tiny")]

    async with JudgeClient(endpoints, AnswerForm.FREE) as judge, EngineRenderer(endpoints) as renderer:
        judging = JudgingActivities(store, judge, renderer.render, notifier)
        await Worker(client, task_queue=names.JUDGE_QUEUE, activities=[judging.judge_turn, judging.judge_turns]).run()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
