"""A session in which one reply was given many times: the right turn is found, and few are read for it."""

from __future__ import annotations

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnRecord
from clawloop.core.turns.identify import named_session_id
from clawloop.core.turns.parents import Candidate
from db.content import PLAIN
from db.database import Database, raw_connection
from db.turns.prepared_turn import Request
from db.turns.session_lookup import candidates_of_many
from tests.contract.conftest import Stores
from tests.records import turn_record

NAMED = SessionEvidence(SessionSource.HEADER, "heartbeats")
DONE: Message = {"role": "assistant", "content": "done"}
CHATS = 20  # more than are read of one reply


def asked(number: int) -> list[Message]:
    return [{"role": "user", "content": f"task {number}"}]


def turn(stores: Stores, messages: list[Message]) -> TurnRecord:
    return turn_record(api_key_id=stores.key, evidence=NAMED, messages=messages, response=DONE)


async def chats_that_end_alike(stores: Stores) -> list[TurnRecord]:
    records = [turn(stores, asked(number)) for number in range(CHATS)]
    for record in records:
        await stores.turns.insert(record)
    return records


async def test_a_reply_in_its_context_is_found_however_often_it_was_given(stores: Stores) -> None:
    records = await chats_that_end_alike(stores)
    for number in (0, CHATS // 2, CHATS - 1):
        later = turn(stores, [*asked(number), DONE, {"role": "user", "content": "go on"}])
        assert (await stores.turns.insert(later)).parent_turn_id == records[number].turn_id


async def test_a_reply_in_a_rewritten_context_is_the_newest(stores: Stores) -> None:
    records = await chats_that_end_alike(stores)
    rewritten = turn(stores, [{"role": "user", "content": "a summary"}, DONE, {"role": "user", "content": "go on"}])
    assert (await stores.turns.insert(rewritten)).parent_turn_id == records[-1].turn_id


@pytest.mark.parametrize(("beginning", "read"), [(asked(0), 1), ([{"role": "user", "content": "a summary"}], 16)])
async def test_few_turns_are_read_for_a_reply_given_many_times(
    postgres_stores: Stores, database: Database, beginning: list[Message], read: int
) -> None:
    await chats_that_end_alike(postgres_stores)
    request = Request(postgres_stores.key, NAMED, [*beginning, DONE])
    session = named_session_id(request.key, NAMED)

    async def find(connection: AsyncConnection) -> list[list[Candidate]]:
        return await candidates_of_many(await raw_connection(connection), PLAIN, [(session, request)])

    (candidates,) = await database.run(find)
    assert len(candidates) == read
