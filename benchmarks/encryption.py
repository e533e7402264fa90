"""What encryption at rest adds to recording a turn: CPU of the process that records, time, and bytes in PostgreSQL.

Turns are stored as a gateway stores them, without a gateway around: those that end together in one transaction. Two
databases of one server take turns, one of them encrypted.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import psycopg

from benchmarks.report import Figure, Ratio, Result
from clawloop.contracts.serving import Scope
from clawloop.contracts.turns import SessionEvidence, SessionSource, TurnRecord
from clawloop.encryption.key_file import make_keys
from clawloop.encryption.sealer import Sealer
from clawloop.ids import ApiKeyId
from clawloop.local.services.postgres import running_postgres
from db.content import PLAIN, ContentCodec
from db.database import Database
from db.schema import migrate
from db.serving.directory import ensure_policy
from db.serving.keys import PostgresKeyStore
from db.turns.insert import PostgresTurnStore
from tests.conftest import database_address, execute
from tests.records import turn_record

KINDS = ("plain", "encrypted")
_ENGLISH = "".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
_LIMIT = timedelta(seconds=60)  # a busy machine must not end a measurement


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=1, help="of the texts")
    parser.add_argument("--rounds", type=int, default=None, help="default: 200; 20 with --quick")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--reply-tokens", type=int, default=64)


def run(options: argparse.Namespace) -> Result:
    rounds = options.rounds or (20 if options.quick else 200)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_keys(folder / "keys")
        codecs = {"plain": PLAIN, "encrypted": ContentCodec(Sealer(folder / "keys"))}
        with running_postgres(folder / "postgres") as server:
            urls = {}
            for kind in KINDS:
                execute(server.url, f"CREATE DATABASE {kind}")
                urls[kind] = database_address(server.url, kind)
                migrate(urls[kind])
            return asyncio.run(_measure(urls, codecs, rounds, options))


async def _measure(
    urls: dict[str, str], codecs: dict[str, ContentCodec], rounds: int, options: argparse.Namespace
) -> Result:
    databases = {kind: Database(urls[kind], _LIMIT, codecs[kind]) for kind in KINDS}
    keys: dict[str, ApiKeyId] = {}
    for kind, database in databases.items():
        await ensure_policy(database, "default", "tiny", [])
        keys[kind] = (await PostgresKeyStore(database).create_key("default", {Scope.CHAT}, "bench"))[0].id
    stores = {kind: PostgresTurnStore(database) for kind, database in databases.items()}
    rng, raw, rows = random.Random(options.seed), dict[str, list[float]](), list[dict[str, Figure]]()
    for together in (1, 8, 16):
        cpu: dict[str, list[float]] = {kind: [] for kind in KINDS}
        wall: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(-2, rounds):  # the first ones connect and warm up
            for kind in KINDS if number % 2 else KINDS[::-1]:
                records = [_turn(rng, keys[kind], options) for _ in range(together)]
                began, cpu_began = time.perf_counter(), time.process_time()
                results = await stores[kind].insert_many(records)
                if number >= 0:
                    cpu[kind].append((time.process_time() - cpu_began) / together * 1000)
                    wall[kind].append((time.perf_counter() - began) / together * 1000)
                for result in results:
                    if isinstance(result, Exception):
                        raise result
        row: dict[str, Figure] = {"turns that end together": together}
        for kind in KINDS:
            row |= {f"{kind}, CPU ms": median(cpu[kind]), f"{kind}, ms": median(wall[kind])}
            raw |= {f"{together}: {kind}, CPU ms": cpu[kind], f"{together}: {kind}, ms": wall[kind]}
        rows.append(row)
    sizes = {kind: _bytes_a_turn(urls[kind]) for kind in KINDS}
    for database in databases.values():
        await database.close()
    for row in rows:
        row |= {f"{kind}, bytes": sizes[kind] for kind in KINDS}
    ratios = {
        f"CPU of a turn, {together} together": Ratio(
            median(raw[f"{together}: encrypted, CPU ms"]) / median(raw[f"{together}: plain, CPU ms"]), "lower"
        )
        for together in (1, 8, 16)
    }
    ratios["bytes of a turn in PostgreSQL"] = Ratio(sizes["encrypted"] / sizes["plain"], "lower")
    return Result(rows, ratios, raw)


def _turn(rng: random.Random, key: ApiKeyId, options: argparse.Namespace) -> TurnRecord:
    name = f"{rng.getrandbits(64):x}"
    reply = options.reply_tokens
    return turn_record(
        api_key_id=key,
        evidence=SessionEvidence(SessionSource.HEADER, name),
        messages=[{"role": "user", "content": _text(rng, options.prompt_tokens)}],
        response={"role": "assistant", "content": _text(rng, reply)},
        prompt_ids=[rng.randrange(150_000) for _ in range(options.prompt_tokens)],
        response_ids=[rng.randrange(150_000) for _ in range(reply)],
        logprobs=[-rng.random() for _ in range(reply)],
    )


def _text(rng: random.Random, tokens: int) -> str:
    """English of about so many tokens: PostgreSQL compresses plain text, and no ciphertext."""
    begin = rng.randrange(len(_ENGLISH) - 4 * tokens)
    return _ENGLISH[begin : begin + 4 * tokens]


def _bytes_a_turn(url: str) -> float:
    """Of the table of turns with its indexes, by the number of its rows."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM turns")
        row = connection.execute("SELECT pg_total_relation_size('turns'), count(*) FROM turns").fetchone()
    assert row is not None
    return float(row[0]) / float(row[1])
