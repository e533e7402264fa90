"""Judged turns a second, the time from a signal to the verdict, and Temporal's events a turn, with many sessions open.

PostgreSQL, Temporal, orchestrator and judge worker are real; the judge answers at once. Turns are stored and their
workflows signalled as a gateway does it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import cast

import psycopg
from temporalio.client import Client

from benchmarks.load import percentile
from benchmarks.processes import (
    LOOPBACK,
    busy_seconds,
    cpu_by_part,
    free_port,
    module,
    resident_megabytes,
    running,
    running_temporal,
    wait_for,
)
from benchmarks.report import Figure, Ratio, Result
from clawloop.app.local.services.postgres import running_postgres
from clawloop.app.processes.bootstrap import prepare
from clawloop.app.temporal.notifier import TemporalNotifier
from clawloop.app.temporal.plugin import connect
from clawloop.core.contracts.notices import SessionNotice
from clawloop.core.contracts.sessions import SessionFacts, TurnRecorded
from clawloop.core.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, TurnRecord
from clawloop.core.ids import ApiKeyId, TurnId, new_turn_id
from clawloop.core.recipes.recipe import Recipe
from db.database import BACKGROUND_LIMIT, Database
from db.serving.keys import PostgresKeyStore
from db.training.recipes import set_recipe
from db.turns.insert import PostgresTurnStore
from tests.records import turn_record

ROLES = ("orchestrator", "judge")
# Whose CPU time is counted, by their command lines. A server that PostgreSQL forks has its name in front.
PARTS = {
    "judge": "worker judge",
    "orchestrator": "worker orchestrator",
    "stub judge": "benchmarks.stub_judge",
    "PostgreSQL": "postgres",
    "Temporal": "start-dev",
    "benchmark": "benchmarks",
}
Workers = dict[str, subprocess.Popen[bytes]]
# As many as a gateway has under way.
AT_ONCE = 32
# A lone turn is alone: the workflow before it, and Temporal, have written what followed their verdict. Without the
# pause it waits 40 ms twice (measured).
LONE_PAUSE = 0.3
# Of a loaded machine: a turn that is not judged by then is an error.
VERDICT_SECONDS = 600.0
ASKED_AT_ONCE = 50
_RECIPE = Recipe(name="combined")
# Judgements without a vote that can be read; hint answers that cannot; judgements without any hint answer.
_UNREAD = """
    SELECT count(*) FILTER (WHERE NOT EXISTS (SELECT FROM votes WHERE judgement_id = j.id AND score IS NOT NULL)),
        (SELECT count(*) FROM hints WHERE accepted IS NULL),
        count(*) FILTER (WHERE NOT EXISTS (SELECT FROM hints WHERE judgement_id = j.id))
    FROM judgements j WHERE decided_at IS NOT NULL
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--open", default=None, help="open sessions; default: 100,1000,10000; 50,200 with --quick")
    parser.add_argument(
        "--turns", type=int, default=None, help="judged together, per size; default: 600; 60 with --quick"
    )
    parser.add_argument("--lone", type=int, default=None, help="judged alone, per size; default: 50; 10 with --quick")


@dataclass
class Chats:
    """Stores turns and signals their workflows.

    Attributes:
        last: of each session, its newest turn.
    """

    url: str
    key: ApiKeyId
    store: PostgresTurnStore
    notifier: TemporalNotifier
    last: dict[str, TurnRecord] = field(default_factory=dict)

    async def turn(self, session: str) -> InsertedTurn:
        """Store the next turn of a session."""
        before = self.last.get(session)
        said: Message = {"role": "user", "content": f"{session}, once more please"}
        messages = [said] if before is None else [*before.messages, before.response or {}, said]
        evidence = SessionEvidence(SessionSource.HEADER, session)
        record = replace(
            turn_record(), turn_id=new_turn_id(), api_key_id=self.key, evidence=evidence, messages=messages
        )
        inserted = await self.store.insert(record)
        self.last[session] = record
        return inserted

    async def signal(self, turn: InsertedTurn) -> None:
        record = next(iter(self.last.values()))
        facts = SessionFacts(turn.session_id, record.policy, SessionSource.HEADER, record.started_at, 0)
        await self.notifier.notify(SessionNotice(facts, TurnRecorded(turn.turn_id, 0, False, turn.opens_session)))
        # As the gateway does; else the sweep signals every session again after a minute.
        await self.store.mark_notified([turn.turn_id], timedelta(0))

    async def open(self, sessions: Sequence[str]) -> list[float]:
        """A first turn in each session; returns what each signal took."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(session: str) -> float:
            async with limit:
                stored = await self.turn(session)
                began = time.perf_counter()
                await self.signal(stored)
                return time.perf_counter() - began

        return list(await asyncio.gather(*map(one, sessions)))


def run(options: argparse.Namespace) -> Result:
    sizes = [int(size) for size in (options.open or ("50,200" if options.quick else "100,1000,10000")).split(",")]
    together, lone = options.turns or (60 if options.quick else 600), options.lone or (10 if options.quick else 50)
    rows: list[dict[str, Figure]] = []
    raw: dict[str, list[float]] = {}
    ratios: dict[str, Ratio] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        postgres = stack.enter_context(running_postgres(folder / "postgres"))
        temporal = stack.enter_context(running_temporal(folder / "temporal"))
        key = asyncio.run(prepare(postgres.url, "tiny", [], [], {}))["chat"]
        workers = stack.enter_context(_workers(folder, postgres.url, temporal))
        asyncio.run(_measure(postgres.url, temporal, key, sizes, together, lone, workers, rows, raw, ratios))
    return Result(rows, ratios, raw)


@contextmanager
def _workers(folder: Path, database_url: str, temporal: str) -> Iterator[Workers]:
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(running(module("benchmarks.stub_judge", port), folder / "stub_judge.log"))
        settings = {
            "DATABASE_URL": database_url,
            "TEMPORAL_ADDRESS": temporal,
            "CLAWLOOP_DATA": str(folder),
            "CLAWLOOP_JUDGE_URL": f"http://{LOOPBACK}:{port}",
            "CLAWLOOP_JUDGE_MODEL": "stub",
        }
        started: Workers = {}
        for role in ROLES:
            health = free_port()
            command = module("clawloop.app.cli.main", "worker", role, "--health-port", health)
            started[role] = stack.enter_context(running(command, folder / f"{role}.log", settings))
            wait_for(f"http://{LOOPBACK}:{health}/readyz", started[role], folder / f"{role}.log")
        yield started


async def _measure(
    url: str,
    temporal: str,
    secret: str,
    sizes: Sequence[int],
    together: int,
    lone: int,
    workers: Workers,
    rows: list[dict[str, Figure]],
    raw: dict[str, list[float]],
    ratios: dict[str, Ratio],
) -> None:
    database = Database(url, BACKGROUND_LIMIT)
    client = await connect(temporal)
    await set_recipe(database, "default", _RECIPE)
    key = await PostgresKeyStore(database).authenticate(secret)
    assert key is not None
    chats = Chats(url, key.id, PostgresTurnStore(database), TemporalNotifier(client, timedelta(hours=1)))
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        for size in sizes:
            missing = [f"open-{number}" for number in range(len(chats.last), size)]
            began = time.perf_counter()
            signals = await chats.open(missing)
            opened = time.perf_counter() - began
            alone = await _lone(chats, connection, lone, size)
            events = await _events_of_one_more(client, chats, connection, f"lone-{size}-0")
            seconds, cpu, others = await _together(chats, connection, together, size)
            all_events, turns = await _events(client, connection, f"many-{size}-0")
            memory = {role: resident_megabytes(worker) for role, worker in workers.items()}
            rows.append(
                {
                    "open sessions": size,
                    "opened/s": len(missing) / opened,
                    "signal p50 ms": median(signals) * 1000,
                    "signal to verdict p50 ms": median(alone) * 1000,
                    "p99 ms": percentile(alone, 0.99) * 1000,
                    "events a lone turn": events,
                    "judged/s": together / seconds,
                    "cores meanwhile": sum(cpu.values()) / seconds,
                    "cores of other programs": others / seconds,
                    "CPU ms a judged turn": sum(cpu.values()) / together * 1000,
                    **{f"of these {part}": spent / together * 1000 for part, spent in cpu.items()},
                    "events a turn together": all_events / turns,
                    **{f"{role} MB": megabytes for role, megabytes in memory.items()},
                }
            )
            raw[f"{size} open: signal to verdict"] = alone
            print(f"{time.strftime('%H:%M:%S')} {size} open sessions", flush=True)
        await _require_answers(connection, _RECIPE)
    await database.close()
    first, last = rows[0], rows[-1]
    ratios["judged turns a second"] = Ratio(float(last["judged/s"] or 0), "higher", 60.0)
    ratios["signal to verdict p50 ms"] = Ratio(float(last["signal to verdict p50 ms"] or 0), "lower", 100.0)
    ratios["events a lone turn"] = Ratio(float(last["events a lone turn"] or 0), "lower", 10.0)
    growth = float(last["signal to verdict p50 ms"] or 0) / float(first["signal to verdict p50 ms"] or 1)
    ratios[f"signal to verdict, {sizes[-1]} open sessions to {sizes[0]}"] = Ratio(growth, "lower", 1.5, enough=1.0)


async def _lone(chats: Chats, connection: psycopg.AsyncConnection[object], count: int, size: int) -> list[float]:
    """Sessions of two turns one after the other; the second shows what followed the first."""
    took = []
    for number in range(count):
        session = f"lone-{size}-{number}"
        judged = (await chats.turn(session)).turn_id
        second = await chats.turn(session)
        began = time.perf_counter()
        await chats.signal(second)
        await _judged(connection, [judged], pause=0.002)
        took.append(time.perf_counter() - began)
        await asyncio.sleep(LONE_PAUSE)
    return took


async def _together(
    chats: Chats,
    connection: psycopg.AsyncConnection[object],
    count: int,
    size: int,
) -> tuple[float, dict[str, float], float]:
    """Sessions of four turns whose signals come all at once.

    Returns:
        Wall seconds, CPU seconds by part, and those of other programs on this machine.
    """
    judged, signals = [], []
    for number in range(-(-count // 3)):
        session = f"many-{size}-{number}"
        turns = [await chats.turn(session) for _ in range(4)]
        judged += [turn.turn_id for turn in turns[:-1]]
        signals += turns
    before, busy_before = cpu_by_part(PARTS), busy_seconds()
    began = time.perf_counter()
    limit = asyncio.Semaphore(AT_ONCE)

    async def signal(turn: InsertedTurn) -> None:
        async with limit:
            await chats.signal(turn)

    await asyncio.gather(*map(signal, signals))
    await _judged(connection, judged, pause=0.1)
    seconds = time.perf_counter() - began
    spent = {part: later - before[part] for part, later in cpu_by_part(PARTS).items()}
    return seconds, spent, busy_seconds() - busy_before - sum(spent.values())


async def _judged(connection: psycopg.AsyncConnection[object], turns: Sequence[TurnId], pause: float) -> None:
    """Until all have a verdict.

    Raises:
        RuntimeError: one was decided without a vote, or has no verdict in time.
    """
    deadline = time.monotonic() + VERDICT_SECONDS
    statement = "SELECT turn_id, verdict, why FROM judgements WHERE turn_id = ANY(%s) AND decided_at IS NOT NULL"
    waiting = set(turns)
    while True:
        # Of some of them only, which cost less to ask for: all are judged when none waits.
        asked = list(itertools.islice(waiting, ASKED_AT_ONCE))
        found = await (await connection.execute(statement, [asked])).fetchall()
        rows = cast(list[tuple[TurnId, int | None, str | None]], found)
        for turn, verdict, why in rows:
            if verdict is None:
                raise RuntimeError(f"turn {turn} was decided without a vote that can be read: {why}")
        waiting -= {turn for turn, _, _ in rows}
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(waiting)} of {len(turns)} turns were not judged in {VERDICT_SECONDS:g} s")
        if len(rows) < len(asked):
            await asyncio.sleep(pause)


async def _require_answers(connection: psycopg.AsyncConnection[object], recipe: Recipe) -> None:
    """
    Raises:
        RuntimeError: a judgement lacks answers that the recipe asks for, or what the judge wrote cannot be read: it was
            asked again then, which was measured too.
    """
    row = await (await connection.execute(_UNREAD)).fetchone()
    without_vote, unread_hints, without_hint = cast(tuple[int, int, int], row)
    if without_vote:
        raise RuntimeError(f"{without_vote} judgements were decided without a vote that can be read")
    if recipe.signal.hints and (unread_hints or without_hint):
        none = f"{without_hint} judgements have none"
        raise RuntimeError(f"{unread_hints} of the judge's answers about hints cannot be read, {none}")


async def _events_of_one_more(
    client: Client, chats: Chats, connection: psycopg.AsyncConnection[object], session: str
) -> float:
    """Events that one more turn of a session that waits for nothing adds to its history."""
    before, _ = await _events(client, connection, session)
    judged = chats.last[session].turn_id
    await chats.signal(await chats.turn(session))
    await _judged(connection, [judged], pause=0.02)
    await asyncio.sleep(1)  # its workflow has still to hear of it
    return (await _events(client, connection, session))[0] - before


async def _events(client: Client, connection: psycopg.AsyncConnection[object], session: str) -> tuple[int, int]:
    """Events in a session's history, and the session's turns."""
    counted = "SELECT s.id, count(*) FROM sessions s JOIN turns t ON t.session_id = s.id"
    statement = f"{counted} WHERE s.external_id = %s GROUP BY 1"
    row = await (await connection.execute(statement, [session])).fetchone()
    assert isinstance(row, tuple)
    described = await client.get_workflow_handle(f"session/{row[0]}").describe()
    return described.history_length, row[1]
