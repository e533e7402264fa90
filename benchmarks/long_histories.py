"""How long sessions with long histories stand still after the orchestrator's death, by how many it replays at once.

Temporal is real, and so are the workflows and their worker, which is killed with SIGKILL; the judge answers at once, in
this process. A turn waits in every session when the next worker starts, beside busy programs as trainer and engine are.
Measured is the time until the judge was asked about all of these turns, with the worker's start. The variants are
measured in turn, forwards and backwards, on the same sessions. Histories are longer than those that Clawloop's Temporal
suggests (1,000 events): it is the worker's limit that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionDescription
from temporalio.worker import Worker

from activities.judging.messages import Judged, JudgeTurn, JudgeTurns
from benchmarks.options import at_least
from benchmarks.processes import module, running_temporal, until
from benchmarks.report import Figure, Ratio, Result
from clawloop.contracts.notices import SessionNotice
from clawloop.contracts.sessions import SessionFacts, TurnRecorded
from clawloop.ids import SessionId, TurnId, new_turn_id
from clawloop.temporal.notifier import TemporalNotifier
from clawloop.temporal.plugin import connect
from clawloop.temporal.replay_slots import REPLAYS
from workflows import names
from workflows.state import SessionState

IDLE = timedelta(hours=1)
DEFAULT = 0
# A session whose orchestrator was killed, and that stands still for longer than this, has failed its user.
GIVE_UP_SECONDS = 120.0
# Of a history that is being written, on two cores with all sessions at once.
WRITING_SECONDS = 900.0
NEVER = 1_000_000  # events


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=at_least(1), default=None, help="default: 16; 8 with --quick")
    parser.add_argument("--turns", type=at_least(1), default=None, help="of each; default: 450; 150 with --quick")
    parser.add_argument("--busy", type=int, default=4, help="programs that compute meanwhile")
    parser.add_argument("--replays", default=f"{REPLAYS},{DEFAULT}", help="limits to compare; 0: the SDK's default")


@dataclass
class InstantJudge:
    asked: set[TurnId] = field(default_factory=set)
    asked_again: asyncio.Event = field(default_factory=asyncio.Event)

    async def asked_about(self, turns: set[TurnId], seconds: float) -> None:
        """Wait until it was asked about all of them, and no longer than this."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not turns <= self.asked:
                    self.asked_again.clear()
                    await self.asked_again.wait()

    @activity.defn(name="judge_turn")
    async def judge_turn(self, ask: JudgeTurn) -> Judged:
        self.asked.add(ask.turn_id)
        self.asked_again.set()
        return Judged(results=[])

    @activity.defn(name="judge_turns")
    async def judge_turns(self, ask: JudgeTurns) -> Judged:
        self.asked.update(ask.turn_ids)
        self.asked_again.set()
        return Judged(results=[])


def run(options: argparse.Namespace) -> Result:
    sessions, turns = options.sessions or (8 if options.quick else 16), options.turns or (150 if options.quick else 450)
    limits = [int(limit) for limit in options.replays.split(",")]
    with tempfile.TemporaryDirectory() as scratch, running_temporal(Path(scratch) / "temporal") as address:
        return asyncio.run(_measure(address, Path(scratch), sessions, turns, options.busy, limits))


async def _measure(address: str, folder: Path, sessions: int, turns: int, busy: int, limits: Sequence[int]) -> Result:
    client, judge = await connect(address), InstantJudge()
    notifier = TemporalNotifier(client, IDLE)
    facts = [SessionFacts(SessionId(uuid4()), "default", "x-session-id", datetime.now(UTC), 0) for _ in range(sessions)]
    judging = Worker(client, task_queue=names.JUDGE_QUEUE, activities=[judge.judge_turn, judge.judge_turns])

    async def say() -> set[TurnId]:
        said = [TurnRecorded(new_turn_id(), 0, False, False) for _ in facts]
        notices = map(SessionNotice, facts, said)
        await asyncio.gather(*map(notifier.notify, notices))
        return {turn.turn_id for turn in said}

    seconds: dict[int, list[float]] = {limit: [] for limit in limits}
    events: dict[int, list[float]] = {limit: [] for limit in limits}
    left: dict[int, list[int]] = {limit: [] for limit in limits}

    async def have_judged(said: set[TurnId]) -> None:
        await judge.asked_about(said, WRITING_SECONDS)
        if not said <= judge.asked:
            last = (folder / "worker.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"not judged within {WRITING_SECONDS:.0f} s: {last}")

    async def be_quiet() -> None:
        """Wait until no workflow has a task: a killed worker's would come again only after 10 s."""
        for one in facts:
            await until(partial(_is_quiet, client, one), "a session's workflow", WRITING_SECONDS)

    async with judging:
        with _worker(address, REPLAYS, folder):
            for one in facts:
                await _begin(client, one)
            for _ in range(turns):
                await have_judged(await say())
            await be_quiet()
        for limit in [*limits, *reversed(limits)]:
            said = await say()
            events[limit].extend([(await _described(client, one)).history_length for one in facts])
            with _busy(busy), _worker(address, limit, folder):
                began = time.perf_counter()
                await judge.asked_about(said, GIVE_UP_SECONDS)
                seconds[limit].append(time.perf_counter() - began)
                left[limit].append(len(said - judge.asked))
            stand_still = f"{left[limit][-1]} of {sessions} stand still"
            print(f"limit {limit or 'default'}: {seconds[limit][-1]:.1f} s, {stand_still}", flush=True)
            with _worker(address, REPLAYS, folder):
                await have_judged(said)
                await be_quiet()
    rows: list[dict[str, Figure]] = [
        {
            "replays of the task queue at once": limit or "the SDK's default",
            "sessions": sessions,
            "events": f"{min(events[limit]):.0f} to {max(events[limit]):.0f}",
            "s until all get on": ", ".join(map(_shown, seconds[limit], left[limit])),
        }
        for limit in limits
    ]
    ratios = {
        f"sessions that stand still for {GIVE_UP_SECONDS:.0f} s with {limit} replays at once": Ratio(
            float(max(left[limit])), "lower", 0.0
        )
        for limit in limits
        if limit != DEFAULT
    }
    return Result(rows, ratios, {f"s, {limit or 'default'}": taken for limit, taken in seconds.items()})


def _shown(seconds: float, left: int) -> str:
    return f"not within {GIVE_UP_SECONDS:.0f} ({left} left)" if left else f"{seconds:.1f}"


async def _begin(client: Client, session: SessionFacts) -> None:
    state = SessionState(
        session_id=session.session_id,
        policy=session.policy,
        idle_seconds=IDLE.total_seconds(),
        adapter_version=0,
        roll_over_events=NEVER,
    )
    await client.start_workflow(
        names.SESSION_WORKFLOW,
        state,
        id=names.session_workflow_id(session.session_id),
        task_queue=names.WORKFLOW_QUEUE,
    )


async def _described(client: Client, session: SessionFacts) -> WorkflowExecutionDescription:
    return await client.get_workflow_handle(names.session_workflow_id(session.session_id)).describe()


async def _is_quiet(client: Client, session: SessionFacts) -> bool:
    return not (await _described(client, session)).raw_description.HasField("pending_workflow_task")


@contextmanager
def _worker(address: str, replays: int, folder: Path) -> Iterator[None]:
    with (folder / "worker.log").open("ab") as log:
        command = module("benchmarks.long_histories_worker", address, replays)
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Programs that compute without end, until the end of the block or of this process."""
    endless = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", endless])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield
