"""A claim finds its samples by an index, however many wait."""

from __future__ import annotations

import time
from datetime import timedelta

import psycopg
import pytest
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from db.tables import Base
from db.training.claims import _FIRST, _FRESH, _PRACTISED
from db.training.work_flag import _READY
from tests.contract.learning import POLICY, PostgresLearning, recipe

pytestmark = pytest.mark.slow

WAITING = 5_000
# Each copy has ids of its own, in no order: the worst case for an index.
COPIES = """CREATE TEMP TABLE copies AS SELECT gen_random_uuid() AS turn, gen_random_uuid() AS judgement,
    gen_random_uuid() AS sample FROM generate_series(1, {many})"""
OWN_IDS: dict[str, dict[str, str]] = {
    "turns": {"id": "c.turn"},
    "judgements": {"id": "c.judgement", "turn_id": "c.turn"},
    "samples": {"id": "c.sample", "turn_id": "c.turn", "judgement_id": "c.judgement"},
}


async def fill(learning: PostgresLearning) -> None:
    """Many copies of one turn with its judgement and sample."""
    await learning.set_recipe(recipe(batch_samples=16))
    await learning.add_samples(1)
    with psycopg.connect(learning.url, autocommit=True) as connection:
        connection.execute(COPIES.format(many=WAITING - 1))
        for table, own in OWN_IDS.items():
            columns = [column.name for column in Base.metadata.tables[table].columns]
            values = ", ".join(own.get(name, f"o.{name}") for name in columns)
            one = f"(SELECT * FROM {table} LIMIT 1) o"
            connection.execute(f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM copies c, {one}")
        connection.execute("ANALYZE")


async def explain(learning: PostgresLearning, query: TextClause, values: dict[str, object]) -> str:
    """PostgreSQL's plan for it, one line each."""

    async def read(connection: AsyncConnection) -> list[str]:
        return list(await connection.scalars(text(f"EXPLAIN {query.text}"), values))

    return "\n".join(await learning.database.run(read))


async def test_a_claim_among_thousands_of_samples_reads_only_its_own(postgres_learning: PostgresLearning) -> None:
    await fill(postgres_learning)
    values: dict[str, object] = {"policy": POLICY, "after": _FIRST, "limit": 32}

    plans = [
        await explain(postgres_learning, _FRESH, values),
        await explain(postgres_learning, _READY, {"policy": POLICY, "batch_groups": 8}),
    ]
    practised = await explain(postgres_learning, _PRACTISED, values)
    assert "Seq Scan on samples" not in practised
    assert "Seq Scan on turns" not in practised
    began = time.perf_counter()
    claim = await postgres_learning.steps.claim(POLICY, 1)
    seconds = time.perf_counter() - began
    print(f"claim of 16 of {WAITING} samples: {seconds * 1000:.0f} ms")  # noqa: T201
    assert claim.samples == 16
    for found in plans:
        assert "samples_policy_state_id_idx" in found
        assert "Seq Scan on samples" not in found
        assert "Seq Scan on turns" not in found
    assert seconds < 5


async def test_thousands_of_stale_samples_expire_within_one_claim(postgres_learning: PostgresLearning) -> None:
    await fill(postgres_learning)
    await postgres_learning.set_recipe(recipe(batch_samples=16).model_copy(update={"name": "other"}))
    await postgres_learning.execute(
        "UPDATE recipes SET signal_hash = 'another' WHERE hash <> (SELECT recipe_hash FROM policies)"
    )
    await postgres_learning.age(timedelta(minutes=1))
    began = time.perf_counter()
    claim = await postgres_learning.steps.claim(POLICY, 1)
    seconds = time.perf_counter() - began
    print(f"{WAITING} samples expired in {seconds:.2f} s")  # noqa: T201
    assert claim.state is None
    (row,) = await postgres_learning.rows("SELECT count(*) AS n FROM samples WHERE reason = 'recipe changed'")
    assert row["n"] == WAITING
    assert seconds < 20
