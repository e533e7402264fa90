"""Inserting many turns at once: the same result as one by one, in any order, from two gateways, beside bad turns."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, TurnRecord
from clawloop.core.errors import ContentUnreadable, RecordUnusable, StoreTimedOut
from clawloop.core.ids import TurnId, new_api_key_id
from clawloop.core.turns.canonical import History
from db.database import CHAT_LIMIT, Database
from db.turns import prepared_turn
from db.turns.insert import PostgresTurnStore, insert_batch
from db.turns.prepared_turn import PreparedTurn
from db.turns.read import ConversationCache
from tests.contract.conftest import Stores
from tests.fakes.turn_store import FakeTurnStore
from tests.records import turn_record

BY_MESSAGES = SessionEvidence(SessionSource.CONVERSATION, None)


def named(name: str) -> SessionEvidence:
    return SessionEvidence(SessionSource.HEADER, name)


def conversation(stores: Stores, name: str, turns: int, evidence: SessionEvidence) -> list[TurnRecord]:
    """Turns that follow each other."""
    records: list[TurnRecord] = []
    messages: list[Message] = []
    for number in range(turns):
        answer: Message = {"role": "assistant", "content": f"answer {number} to {name}"}
        messages = [*messages, {"role": "user", "content": f"question {number} of {name}"}]
        records.append(turn_record(api_key_id=stores.key, evidence=evidence, messages=messages, response=answer))
        messages = [*messages, answer]
    return records


async def assert_in_line(stores: Stores, records: list[TurnRecord]) -> None:
    """Each turn is stored whole, in one session, below the turn before it."""
    parent: TurnId | None = None
    sessions = set()
    for record in records:
        stored = await stores.turns.load(record.turn_id)
        assert stored is not None
        assert stored.record == record
        assert stored.parent_turn_id == parent
        sessions.add(stored.session_id)
        parent = record.turn_id
    assert len(sessions) == 1


def second_gateway(stores: Stores) -> FakeTurnStore | PostgresTurnStore:
    """A store on the same turns that shares no cache."""
    if isinstance(stores.turns, PostgresTurnStore):
        return PostgresTurnStore(stores.turns._database)
    return stores.turns


async def test_turns_of_many_sessions_are_stored_together(stores: Stores) -> None:
    lines = [conversation(stores, f"{stores.key} {n}", 3, named(f"s{n}") if n % 2 else BY_MESSAGES) for n in range(12)]
    for number in range(3):
        records = [line[number] for line in lines]
        results = await stores.turns.insert_many(records)
        assert [result.turn_id for result in results if isinstance(result, InsertedTurn)] == [
            record.turn_id for record in records
        ]
    for line in lines:
        await assert_in_line(stores, line)


async def test_conversations_that_begin_alike_are_stored_together(
    postgres_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, sizes = postgres_stores, list[int]()

    async def counted(
        connection: AsyncConnection, conversations: ConversationCache, turns: Sequence[PreparedTurn]
    ) -> list[InsertedTurn | None]:
        sizes.append(len(turns))
        return await insert_batch(connection, conversations, turns)

    monkeypatch.setattr("db.turns.insert.insert_batch", counted)
    opening: Message = {"role": "user", "content": f"the same of {stores.key}"}
    answers: list[Message] = [{"role": "assistant", "content": f"answer {n}"} for n in range(8)]
    for answer in answers:
        await stores.turns.insert(
            turn_record(api_key_id=stores.key, evidence=BY_MESSAGES, messages=[opening], response=answer)
        )
    sizes.clear()
    later = [
        turn_record(
            api_key_id=stores.key,
            evidence=BY_MESSAGES,
            messages=[opening, answer, {"role": "user", "content": f"more {n}"}],
            response={"role": "assistant", "content": f"more of {n}"},
        )
        for n, answer in enumerate(answers)
    ]
    results = await stores.turns.insert_many(later)
    assert len({result.session_id for result in results if isinstance(result, InsertedTurn)}) == 8
    assert sizes == [8]


async def test_a_turn_that_our_code_cannot_read_costs_no_other(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    good = conversation(stores, f"{stores.key} good", 1, BY_MESSAGES)[0]
    bad = conversation(stores, f"{stores.key} bad", 1, BY_MESSAGES)[0]

    def broken(seed: bytes, messages: Sequence[Message]) -> History:
        if messages == bad.messages:
            raise KeyError("a bug")
        return History(seed, messages)

    monkeypatch.setattr(prepared_turn, "History", broken)
    failed, inserted = await stores.turns.insert_many([bad, good])
    assert isinstance(failed, RecordUnusable)
    assert str(failed) == "KeyError in our own code while the turn was read"
    assert isinstance(inserted, InsertedTurn)
    await assert_in_line(stores, [good])


async def test_no_turns_are_no_work(stores: Stores) -> None:
    assert await stores.turns.insert_many([]) == []


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), by_name=st.booleans())
async def test_parents_arrive_in_any_order_and_grouping_from_two_gateways(
    stores: Stores, seed: int, by_name: bool
) -> None:
    chance = random.Random(seed)
    name = f"{seed} {chance.random()} {by_name}"
    lines = [conversation(stores, f"{name} {n}", 4, named(f"{name} {n}") if by_name else BY_MESSAGES) for n in range(2)]
    records = [record for line in lines for record in line]
    records += chance.sample(records, 2)  # a spool's turn may come twice
    chance.shuffle(records)
    gateways = [stores.turns, second_gateway(stores)]
    batches: list[list[TurnRecord]] = []
    while records:
        size = chance.randint(1, 5)
        batches.append(records[:size])
        records = records[size:]

    async def send(gateway: int) -> None:
        for batch in batches[gateway::2]:
            results = await gateways[gateway].insert_many(batch)
            assert not [result for result in results if isinstance(result, Exception)]

    await asyncio.gather(send(0), send(1))

    for line in lines:
        await assert_in_line(stores, line)


@pytest.mark.parametrize("evidence", [named("opens"), BY_MESSAGES])
async def test_only_the_turn_stored_first_opens_its_session(stores: Stores, evidence: SessionEvidence) -> None:
    first, second, third = conversation(stores, "opened", 3, evidence)

    inserted = [await stores.turns.insert(turn) for turn in (second, first, third)]

    assert [turn.opens_session for turn in inserted] == [True, False, False]
    assert len({turn.session_id for turn in inserted}) == 1


async def test_a_turn_that_two_gateways_insert_at_once_is_stored_once(stores: Stores) -> None:
    records = [turn_record(f"{n}", api_key_id=stores.key, evidence=named(f"twice {n}")) for n in range(5)]
    both = await asyncio.gather(
        stores.turns.insert_many([*records, records[0]]), second_gateway(stores).insert_many(records[::-1])
    )
    results = [result for results in both for result in results]
    assert sum(isinstance(result, InsertedTurn) and not result.duplicate for result in results) == 5
    assert sum(isinstance(result, InsertedTurn) and result.duplicate for result in results) == 6


@pytest.mark.parametrize(
    "broken",
    [
        {"messages": [{"role": "user", "content": "x", "n": math.inf}]},
        {"prompt_ids": [2**31]},
    ],
)
async def test_one_unusable_turn_costs_no_other(stores: Stores, broken: dict[str, Any]) -> None:
    good = [turn_record(f"{n}", api_key_id=stores.key, evidence=named(f"good {n}")) for n in range(4)]
    bad = turn_record(api_key_id=stores.key, evidence=named("bad"), **broken)

    results = await stores.turns.insert_many([*good[:2], bad, *good[2:]])

    assert [type(result) for result in results] == [InsertedTurn, InsertedTurn, RecordUnusable, *[InsertedTurn] * 2]
    assert await stores.turns.load(bad.turn_id) is None


async def test_a_turn_that_only_postgresql_refuses_costs_no_other(postgres_stores: Stores) -> None:
    stores = postgres_stores
    good = [turn_record(f"{n}", api_key_id=stores.key, evidence=named(f"good {n}")) for n in range(4)]
    without_key = turn_record(api_key_id=new_api_key_id(), evidence=named("no key"))

    results = await stores.turns.insert_many([*good[:2], without_key, *good[2:]])

    assert [type(result) for result in results] == [InsertedTurn, InsertedTurn, RecordUnusable, *[InsertedTurn] * 2]
    for record in good:
        assert await stores.turns.load(record.turn_id) is not None


async def damage(url: str, turn: TurnRecord) -> None:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute("UPDATE turns SET messages_added = '\"%%\"' WHERE id = %s", [turn.turn_id])


async def test_a_turn_that_continues_a_damaged_one_is_stored_whole(postgres_url: str, postgres_stores: Stores) -> None:
    first, second, third = conversation(postgres_stores, "a damaged parent", 3, named("damaged"))
    await postgres_stores.turns.insert_many([first, second])
    await damage(postgres_url, second)
    await second_gateway(postgres_stores).insert(third)
    with pytest.raises(ContentUnreadable):
        await second_gateway(postgres_stores).load(second.turn_id)
    stored = await second_gateway(postgres_stores).load(third.turn_id)
    assert stored is not None
    assert (stored.record, stored.parent_turn_id) == (third, second.turn_id)


async def test_a_late_turn_is_stored_beside_a_damaged_one(postgres_url: str, postgres_stores: Stores) -> None:
    first, second, third = conversation(postgres_stores, "a damaged turn", 3, named("damaged"))
    await postgres_stores.turns.insert(second)
    await damage(postgres_url, second)
    await second_gateway(postgres_stores).insert_many([first, third])
    found = [await second_gateway(postgres_stores).load(turn.turn_id) for turn in (first, third)]
    assert [stored.record for stored in found if stored is not None] == [first, third]


async def test_a_locked_session_holds_up_only_its_own_turn(postgres_url: str, postgres_stores: Stores) -> None:
    records = [turn_record(f"{n}", api_key_id=postgres_stores.key, evidence=named(f"lock {n}")) for n in range(4)]
    first = await postgres_stores.turns.insert(records[0])
    again = turn_record("again", api_key_id=postgres_stores.key, evidence=named("lock 0"))
    gateway = Database(postgres_url, CHAT_LIMIT * 4)  # a busy machine must not fail the others
    async with await psycopg.AsyncConnection.connect(postgres_url) as connection:
        await connection.execute("SELECT FROM sessions WHERE id = %s FOR UPDATE", [first.session_id])
        results = await PostgresTurnStore(gateway).insert_many([again, *records[1:]])
    await gateway.close()

    assert [type(result) for result in results] == [StoreTimedOut, *[InsertedTurn] * 3]
    assert not (await postgres_stores.turns.insert(again)).duplicate


async def test_a_batch_takes_no_more_statements_than_a_lone_turn(
    postgres_stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements: list[object] = []
    execute = psycopg.AsyncConnection.execute

    async def counted(self: psycopg.AsyncConnection[Any], query: Any, *arguments: Any, **named: Any) -> Any:
        statements.append(query)
        return await execute(self, query, *arguments, **named)

    monkeypatch.setattr(psycopg.AsyncConnection, "execute", counted)
    counts: list[int] = []
    for size in (1, 30):
        statements.clear()
        records = [
            turn_record(f"{n}", api_key_id=postgres_stores.key, evidence=named(f"{size} {n}")) for n in range(size)
        ]
        await postgres_stores.turns.insert_many(records)
        counts.append(len(statements))
    lone, batch = counts
    assert lone <= 4
    assert batch <= lone + 1  # how long it waits for locks
