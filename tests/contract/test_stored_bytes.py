"""What each key stores is counted as turns are inserted, commented on and erased."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import psycopg

from clawloop.core.contracts.turns import SessionEvidence, SessionSource, TurnRecord
from clawloop.core.ids import ApiKeyId
from db.database import Database
from db.erasure import PostgresErasureStore
from db.judging.feedback import PostgresFeedbackStore
from db.serving.keys import PostgresKeyStore
from db.sweep import PostgresSweepStore
from db.turns.insert import PostgresTurnStore
from db.turns.stored_bytes import ROW_BYTES
from tests.contract.conftest import Stores
from tests.pictures import asks_about, png
from tests.records import turn_record


def turn(key: ApiKeyId, session: str, words: str, tools: list[str] | None = None) -> TurnRecord:
    return turn_record(
        api_key_id=key,
        evidence=SessionEvidence(SessionSource.HEADER, session),
        messages=[{"role": "user", "content": words}],
        tools=None if tools is None else [{"type": "function", "function": {"name": name}} for name in tools],
    )


async def stored(database: Database, *keys: ApiKeyId) -> list[int]:
    found = await PostgresKeyStore(database).stored_bytes(keys)
    return [found.get(key, 0) for key in keys]


async def test_each_keys_turns_are_counted_by_all_gateways(postgres_stores: Stores, database: Database) -> None:
    mine, other = postgres_stores.key, postgres_stores.other_key
    gateways = PostgresTurnStore(database), PostgresTurnStore(database)
    words = "é" * 10_000
    await gateways[0].insert_many([turn(mine, "a", words), turn(other, "b", "short"), turn(mine, "c", words)])
    await asyncio.gather(*(gateway.insert(turn(mine, f"d{n}", words)) for n, gateway in enumerate(gateways)))
    of_mine, of_other = await stored(database, mine, other)
    assert 4 * (ROW_BYTES + 20_000) < of_mine < 4 * (ROW_BYTES + 21_000)
    assert ROW_BYTES < of_other < ROW_BYTES + 1000


async def test_a_turn_that_is_inserted_twice_counts_once(postgres_stores: Stores, database: Database) -> None:
    record = turn(postgres_stores.key, "a", "hello")
    await postgres_stores.turns.insert(record)
    once = await stored(database, postgres_stores.key)
    await postgres_stores.turns.insert(record)
    assert await stored(database, postgres_stores.key) == once


async def test_a_tool_list_counts_where_it_is_stored_first(postgres_stores: Stores, database: Database) -> None:
    mine, other, tools = postgres_stores.key, postgres_stores.other_key, [f"tool_{n}" for n in range(1000)]
    await postgres_stores.turns.insert_many([turn(mine, "a", "x", tools), turn(mine, "b", "x", ["another"])])
    await postgres_stores.turns.insert(turn(other, "c", "x", tools))
    of_mine, of_other = await stored(database, mine, other)
    assert of_mine > 2 * ROW_BYTES + 30_000
    assert of_other < ROW_BYTES + 1000


async def test_files_count_with_each_turn_that_adds_them(postgres_stores: Stores, database: Database) -> None:
    key, picture = postgres_stores.key, png(pixels=b"p" * 10_000)
    first, second = (replace(turn(key, session, ""), messages=[asks_about(picture)]) for session in ("a", "b"))
    await postgres_stores.turns.insert_many([first, second])
    (both,) = await stored(database, key)
    assert 2 * (ROW_BYTES + 10_000) < both < 2 * (ROW_BYTES + 11_000)
    for record in (first, second):
        await PostgresErasureStore(database).erase_turn(record.turn_id)
    assert await stored(database, key) == [0]


async def test_what_is_erased_gives_its_room_back(postgres_stores: Stores, database: Database) -> None:
    key, erasures = postgres_stores.key, PostgresErasureStore(database)
    first, second = turn(key, "a", "x" * 5000), turn(key, "b", "y" * 5000, ["tool"])
    await postgres_stores.turns.insert_many([first, second])
    (before,) = await stored(database, key)
    feedback = PostgresFeedbackStore(database)
    assert await feedback.give(key, first.turn_id, None, "z" * 3000) is not None
    (commented,) = await stored(database, key)
    assert commented == before + ROW_BYTES + 3000
    assert await erasures.erase_turn(first.turn_id) is not None
    (left,) = await stored(database, key)
    assert ROW_BYTES + 5000 < left < ROW_BYTES + 6000
    assert await erasures.erase_turn(first.turn_id) is not None  # erased already
    assert await erasures.erase_turn(second.turn_id) is not None
    assert await stored(database, key) == [0]


async def test_the_sweep_merges_the_counts(postgres_stores: Stores, database: Database, postgres_url: str) -> None:
    mine, other = postgres_stores.key, postgres_stores.other_key
    for n in range(3):
        await postgres_stores.turns.insert(turn(mine, f"m{n}", "x"))
    await postgres_stores.turns.insert(turn(other, "o", "x"))
    before = await stored(database, mine, other)
    sweep = PostgresSweepStore(database)
    await asyncio.gather(*(sweep.merge_stored_bytes() for _ in range(4)))
    with psycopg.connect(postgres_url) as connection:
        rows = connection.execute("SELECT count(*) FROM stored_bytes GROUP BY api_key_id").fetchall()
    assert rows == [(1,), (1,)]
    assert await stored(database, mine, other) == before
    assert await sweep.merge_stored_bytes() == 0
