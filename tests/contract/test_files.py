"""Files of messages are stored once, are found by their turns, and go with the last of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, TurnRecord
from clawloop.core.turns.files import STORED, references_in
from db.database import Database
from db.invariants import violations
from db.turns.insert import insert_batch
from db.turns.prepared_turn import PreparedTurn
from db.turns.read import ConversationCache
from tests.contract.conftest import Stores
from tests.pictures import asks_about, png
from tests.records import turn_record

ROUND, SQUARE = png(), png(512, 512, pixels=b"a square")
NAMED = SessionEvidence(SessionSource.HEADER, "pictures")


def named(content: bytes) -> str:
    return sha256(content).hexdigest()


def turns_about(stores: Stores, *pictures: bytes, **fields: Any) -> list[TurnRecord]:
    """A conversation in which each turn shows one more picture, as a client sends it: with all pictures before."""
    messages: list[Message] = []
    turns: list[TurnRecord] = []
    for n, picture in enumerate(pictures):
        messages = [*messages, asks_about(picture, f"What is number {n}?")]
        reply: Message = {"role": "assistant", "content": f"Number {n} is a cat."}
        turns.append(turn_record(**{"api_key_id": stores.key} | fields, messages=messages, response=reply))
        messages = [*messages, reply]
    return turns


async def insert(stores: Stores, *turns: TurnRecord) -> list[InsertedTurn]:
    return [await stores.turns.insert(turn) for turn in turns]


async def test_a_conversation_with_pictures_goes_on_without_a_name(stores: Stores) -> None:
    turns = turns_about(stores, ROUND, SQUARE, ROUND)
    inserted = await insert(stores, *turns)
    assert len({one.session_id for one in inserted}) == 1
    assert [one.parent_turn_id for one in inserted] == [None, turns[0].turn_id, turns[1].turn_id]
    other = await insert(stores, *turns_about(stores, SQUARE, ROUND))
    assert len({one.session_id for one in (*inserted, *other)}) == 2  # the same words about other pictures
    stored = await stores.turns.load(turns[2].turn_id)
    assert stored is not None
    assert references_in(stored.record.messages) == {named(ROUND), named(SQUARE)}
    assert "base64" not in str(stored.record.messages)
    session = inserted[0].session_id
    found = await stores.files.of_session(session, {named(ROUND), named(SQUARE), "0" * 64})
    assert found == {named(ROUND): ROUND, named(SQUARE): SQUARE}
    assert await stores.files.read(named(ROUND)) == ROUND
    assert await stores.files.read("0" * 64) is None
    version = await stores.turns.version_of_parent(stores.key, turns[1].evidence, turns[1].messages)
    assert version == turns[0].version


async def test_a_file_goes_with_its_last_turn(stores: Stores) -> None:
    first, second = turns_about(stores, ROUND, SQUARE, evidence=NAMED)
    (held, _), (kept,) = await insert(stores, first, second), await insert(stores, *turns_about(stores, ROUND))
    await stores.erasures.erase_turn(second.turn_id)
    assert await stores.files.read(named(SQUARE)) is None
    await stores.erasures.erase_session(held.session_id)
    assert await stores.files.of_session(held.session_id, {named(ROUND)}) == {}
    assert await stores.files.read(named(ROUND)) == ROUND
    await stores.erasures.erase_session(kept.session_id)
    assert await stores.files.read(named(ROUND)) is None
    again = turns_about(stores, ROUND)
    await insert(stores, *again)
    assert await stores.files.read(named(ROUND)) == ROUND


async def test_a_reference_that_a_client_makes_up_shows_nobodys_file(stores: Stores) -> None:
    await insert(stores, *turns_about(stores, ROUND))
    forged: Message = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": {STORED: {"sha256": named(ROUND), "bytes": 1}}}}],
    }
    (other,) = await insert(stores, turn_record(api_key_id=stores.other_key, messages=[forged]))
    assert await stores.files.of_session(other.session_id, {named(ROUND)}) == {}


async def test_turns_that_come_late_or_twice_have_their_files(stores: Stores) -> None:
    first, second = turns_about(stores, ROUND, SQUARE, evidence=NAMED)
    (late, _, again) = await insert(stores, second, first, first)
    assert again.duplicate
    stored = await stores.turns.load(second.turn_id)
    assert stored is not None
    assert stored.parent_turn_id == first.turn_id
    assert set(await stores.files.of_session(late.session_id, {named(ROUND), named(SQUARE)})) == {
        named(ROUND),
        named(SQUARE),
    }
    await stores.erasures.erase_session(late.session_id)
    assert await stores.files.read(named(ROUND)) is None
    delayed = replace(turns_about(stores, ROUND, evidence=NAMED)[0], started_at=first.started_at)
    (bare,) = await insert(stores, delayed)
    assert bare.erased
    assert await stores.files.read(named(ROUND)) is None  # nothing of a turn that began before the erasure


async def test_each_file_is_stored_once(postgres_stores: Stores, database: Database) -> None:
    turns = turns_about(postgres_stores, ROUND, SQUARE, ROUND, ROUND)
    await insert(postgres_stores, *turns, *turns_about(postgres_stores, ROUND, evidence=NAMED))
    assert await counted(database) == (2, 5)
    assert await violations(database) == []


class Killed(Exception):
    pass


async def test_a_file_is_not_left_by_a_transaction_that_was_killed(postgres_stores: Stores, database: Database) -> None:
    """Turns and files are written and erased together: what a `kill -9` leaves is all of them or none."""
    (turn,) = turns_about(postgres_stores, ROUND, evidence=NAMED)

    async def insert_and_die(connection: AsyncConnection) -> None:
        await insert_batch(connection, ConversationCache(), [PreparedTurn.checked(turn)])
        raise Killed

    with pytest.raises(Killed):
        await database.run(insert_and_die)
    assert await counted(database) == (0, 0)
    await insert(postgres_stores, turn)
    assert await counted(database) == (1, 1)


async def counted(database: Database) -> tuple[int, int]:
    """Rows of `files` and of `turn_files`."""

    async def count(connection: AsyncConnection) -> tuple[int, int]:
        files, references = [
            (await connection.exec_driver_sql(f"SELECT count(*) FROM {table}")).scalar_one()
            for table in ("files", "turn_files")
        ]
        return files, references

    return await database.run(count)


async def test_turns_and_erasures_of_one_file_at_once_leave_it_as_long_as_a_turn_has_it(
    postgres_stores: Stores, database: Database
) -> None:
    def both(n: int, *pictures: bytes) -> TurnRecord:
        messages = [asks_about(picture) for picture in pictures]
        named_so = SessionEvidence(SessionSource.HEADER, f"session {n}")
        return turn_record(api_key_id=postgres_stores.key, evidence=named_so, messages=messages)

    early = await insert(postgres_stores, *(both(n, ROUND, SQUARE) for n in range(8)))
    later = [both(100 + n, *((ROUND, SQUARE) if n % 2 else (SQUARE, ROUND))) for n in range(8)]
    results = await asyncio.gather(
        *(postgres_stores.turns.insert(turn) for turn in later),
        *(postgres_stores.erasures.erase_session(one.session_id) for one in early),
    )
    assert None not in results
    assert await counted(database) == (2, 16)
    assert await violations(database) == []
    for one in results[: len(later)]:
        assert isinstance(one, InsertedTurn)
        found = await postgres_stores.files.of_session(one.session_id, {named(ROUND), named(SQUARE)})
        assert len(found) == 2
        await postgres_stores.erasures.erase_session(one.session_id)
    assert await counted(database) == (0, 0)
