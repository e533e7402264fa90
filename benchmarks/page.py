"""How fast the page is with many sessions: lists, filters, one long session; beside them the same over REST.

A real gateway on a real PostgreSQL; turns are stored as a gateway stores them. No engine and no Temporal: nothing here
asks them.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median

import httpx
import psycopg

from benchmarks.processes import LOOPBACK, free_port, module, running, wait_for
from benchmarks.report import Figure, Ratio, Result
from clawloop.contracts.turns import Message, SessionEvidence, SessionSource, TurnRecord
from clawloop.ids import ApiKeyId
from clawloop.local.services.postgres import running_postgres
from clawloop.processes.bootstrap import prepare
from db.database import Database
from db.turns.conversation_cache import ConversationCache
from db.turns.insert import PostgresTurnStore
from tests.records import turn_record

_LIMIT = timedelta(seconds=60)  # a busy machine must not end a measurement
_TOGETHER = 100
_LONG = "long"
# A page that is there within a second is there at once, for a person.
_GOAL_SECONDS = 1.0
_JUDGED = """
    INSERT INTO judgements (id, turn_id, recipe_hash, revision, evidence_hash, verdict, outcome, why, decided_at)
    SELECT gen_random_uuid(), t.id, (SELECT recipe_hash FROM policies LIMIT 1), 0, '',
        (row_number() OVER (ORDER BY t.id)) % 3 - 1, 'sampled', 'verdict', now()
    FROM turns t WHERE t.id IN (SELECT parent_turn_id FROM turns)
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=None, help="default: 10,000; 500 with --quick")
    parser.add_argument("--turns", type=int, default=None, help="of the long session; default: 2,000; 100 with --quick")
    parser.add_argument("--requests", type=int, default=20, help="of each page")


def run(options: argparse.Namespace) -> Result:
    sessions = options.sessions or (500 if options.quick else 10_000)
    turns = options.turns or (100 if options.quick else 2_000)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        postgres = stack.enter_context(running_postgres(folder / "postgres"))
        keys = asyncio.run(prepare(postgres.url, "tiny", [], [], {}))
        asyncio.run(_fill(postgres.url, sessions, turns))
        port = free_port()
        settings = {"DATABASE_URL": postgres.url, "CLAWLOOP_DATA": str(folder / "data")}
        (folder / "data").mkdir()
        command = module("clawloop.cli.main", "gateway", "--port", port)
        process = stack.enter_context(running(command, folder / "gateway.log", settings))
        url = f"http://{LOOPBACK}:{port}"
        wait_for(f"{url}/healthz", process, folder / "gateway.log")
        raw = _measure(url, keys["admin"], options.requests)
    rows: list[dict[str, Figure]] = [
        {"page": name, "p50 s": median(seconds), "slowest s": max(seconds)} for name, seconds in raw.items()
    ]
    ratios = {
        f"{name}, slowest of {options.requests}, s": Ratio(max(seconds), "lower", _GOAL_SECONDS)
        for name, seconds in raw.items()
    }
    return Result(rows, ratios, raw)


async def _fill(url: str, sessions: int, turns: int) -> None:
    """Sessions of two turns each, the first of which is judged, and a long one."""
    database = Database(url, _LIMIT)
    store = PostgresTurnStore(database, ConversationCache())
    async with await psycopg.AsyncConnection.connect(url) as connection:
        found = await (await connection.execute("SELECT id FROM api_keys WHERE 'chat' = ANY(scopes)")).fetchone()
    assert found is not None
    key = ApiKeyId(found[0])
    for begin in range(0, sessions, _TOGETHER):
        names = [f"session {number}" for number in range(begin, min(begin + _TOGETHER, sessions))]
        firsts = {name: [_user(f"What can you tell me of {name}? {'And more. ' * 20}")] for name in names}
        await _insert(store, [_turn(key, name, said) for name, said in firsts.items()])
        seconds = {name: [*said, _reply(), _user("Make it shorter, please.")] for name, said in firsts.items()}
        await _insert(store, [_turn(key, name, said) for name, said in seconds.items()])
    said: list[Message] = []
    for number in range(turns):
        said.append(_user(f"Line {number} of a long talk. {'And more. ' * 20}"))
        await _insert(store, [_turn(key, _LONG, list(said))])
        said.append(_reply())
    await database.close()
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(_JUDGED)
        await connection.execute("ANALYZE")


async def _insert(store: PostgresTurnStore, records: list[TurnRecord]) -> None:
    for stored in await store.insert_many(records):
        if isinstance(stored, Exception):
            raise stored


def _user(words: str) -> Message:
    return {"role": "user", "content": words}


def _reply() -> Message:
    return {"role": "assistant", "content": "It is a long story. " * 30}


def _turn(key: ApiKeyId, session: str, said: list[Message]) -> TurnRecord:
    evidence = SessionEvidence(SessionSource.HEADER, session)
    return turn_record(api_key_id=key, evidence=evidence, messages=said, response=_reply())


def _measure(url: str, key: str, requests: int) -> dict[str, list[float]]:
    """Seconds of each request, by page."""
    with httpx.Client(base_url=url, timeout=60) as client:
        token = re.search(r'name="token" value="([^"]+)"', client.get("/ui/login").text)
        assert token is not None
        client.post("/ui/login", data={"token": token[1], "key": key})
        headers = {"Authorization": f"Bearer {key}"}
        long = client.get(f"/admin/v1/sessions/{_LONG}?limit=1", headers=headers).json()["session"]["id"]
        pages = {
            "sessions": "/ui/sessions",
            "blamed ones": "/ui/sessions?verdict=blamed",
            "what was said in one": "/ui/sessions?text=session+77%3F",
            "what nobody said": "/ui/sessions?text=nobody+said+this",
            "by outcome": "/ui/sessions?outcome=trained",
            "now": "/ui?policy=default",
            "chart": "/ui/chart",
            "long session, first page": f"/ui/sessions/{long}",
            "long session, last page": f"/ui/sessions/{long}?page=40",
            "versions": "/ui/versions",
            "sessions over REST": "/admin/v1/sessions",
            "long session over REST": f"/admin/v1/sessions/{long}?content=true&limit=50",
        }
        found: dict[str, list[float]] = {}
        for name, path in pages.items():
            found[name] = []
            for number in range(-1, requests):  # the first one connects and warms up
                began = time.perf_counter()
                answer = client.get(path, headers=headers if path.startswith("/admin") else {})
                seconds = time.perf_counter() - began
                assert answer.status_code == 200, (path, answer.status_code)
                if number >= 0:
                    found[name].append(seconds)
        return found
