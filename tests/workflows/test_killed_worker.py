"""A judge worker killed between its stored votes and the decision: another decides by them and asks for none again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from tests.judging.conftest import Bench, bench, binary_bench, judge
from tests.workflows.conftest import end_all
from tests.workflows.test_whole import end, tell
from workflows import names
from workflows.activity_options import JUDGE
from workflows.session import SessionWorkflow

__all__ = ["bench", "binary_bench", "judge"]

ROOT = Path(__file__).parents[2]


def begin_worker(client: Client, bench: Bench, mark: Path) -> subprocess.Popen[bytes]:
    address = client.service_client.config.target_host
    program = Path(__file__).with_name("killed_worker.py")
    return subprocess.Popen(
        [sys.executable, str(program), address, bench.url, bench.judge.url, str(mark)],
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
    )


async def test_the_next_worker_asks_for_no_stored_vote_again(
    client: Client, binary_bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = binary_bench
    # The test waits for the dead worker's silence, not for half a minute of it; a busy machine may stop for 2 s.
    monkeypatch.setitem(JUDGE, "heartbeat_timeout", timedelta(seconds=4))
    first, second = bench.conversation("one", "two")
    bench.judge.votes = [1, 1, -1]
    talk = await bench.insert(first, second)
    mark = tmp_path / "mark"
    worker = begin_worker(client, bench, mark)
    try:
        async with (
            Worker(client, task_queue=names.WORKFLOW_QUEUE, workflows=[SessionWorkflow]),
            Worker(client, task_queue=names.LEDGER_QUEUE, activities=[bench.ledger.close_session]),
        ):
            try:
                await tell(client, talk, second, ends=True)
                assert await asyncio.to_thread(worker.wait, 60) == -9
                votes = bench.rows("SELECT score FROM votes ORDER BY index")
                assert [vote["score"] for vote in votes] == [1, 1, -1]
                bench.judge.votes = [-1, -1, -1]
                worker = begin_worker(client, bench, mark)
                await end(client, talk)
            finally:
                await end_all(client)
    finally:
        worker.kill()
        worker.wait()
    assert [request.get("n", 1) for request in bench.judge.requests] == [3]
    assert [vote["score"] for vote in bench.rows("SELECT score FROM votes ORDER BY index")] == [1, 1, -1]
    assert len(bench.rows("SELECT * FROM samples")) == 1
    assert (await bench.turn(first.turn_id)).outcome_detail == "verdict good: 2 of 3 votes good"
