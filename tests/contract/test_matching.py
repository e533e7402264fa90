"""Replies that come back are found, among many and in other words; what a key stores is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from pydantic import JsonValue
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.turns import (
    MatchedBy,
    Message,
    SessionEvidence,
    SessionSource,
    StoredTurn,
    TurnRecord,
    TurnStatus,
)
from clawloop.core.ids import ApiKeyId, TurnId
from clawloop.core.turns.canonical import History
from clawloop.core.turns.identify import named_session_id
from clawloop.core.turns.parents import Candidate
from clawloop.core.turns.places import AskedTurn, Placed, find_places
from db.content import PLAIN
from db.database import Database, raw_connection
from db.erasure import PostgresErasureStore
from db.judging.feedback import PostgresFeedbackStore
from db.serving.keys import PostgresKeyStore
from db.sweep import PostgresSweepStore
from db.turns.insert import PostgresTurnStore
from db.turns.prepared_turn import Request
from db.turns.session_lookup import candidates_of_many
from db.turns.stored_bytes import ROW_BYTES
from tests.contract.conftest import Stores
from tests.pictures import asks_about, png
from tests.records import turn_record

# Replies that come back in other words are found by their place, in memory and in PostgreSQL.

NAMED = SessionEvidence(SessionSource.HEADER, "chat-1")
BY_MESSAGES = SessionEvidence(SessionSource.CONVERSATION, None)
ASKED: list[Message] = [{"role": "user", "content": "time in Oslo?"}]


def calling(identity: str, city: str = "Oslo") -> Message:
    function: dict[str, JsonValue] = {"name": "get_time", "arguments": f'{{"city": "{city}"}}'}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": identity, "type": "function", "function": function}],
    }


def told(identity: str) -> Message:
    return {"role": "tool", "tool_call_id": identity, "content": "ten"}


async def inserted(stores: Stores, messages: list[Message], reply: Message, **changes: Any) -> StoredTurn:
    record: TurnRecord = turn_record(api_key_id=stores.key, messages=messages, response=reply, **changes)
    await stores.turns.insert(record)
    stored = await stores.turns.load(record.turn_id)
    assert stored is not None
    return stored


def parent(stored: StoredTurn) -> tuple[TurnId | None, MatchedBy | None]:
    return stored.parent_turn_id, stored.matched_by


@pytest.mark.parametrize("evidence", [NAMED, BY_MESSAGES])
async def test_renamed_call_ids_continue_the_conversation(stores: Stores, evidence: SessionEvidence) -> None:
    first = await inserted(stores, ASKED, calling("chatcmpl1"), evidence=evidence)
    assert parent(first) == (None, None)
    later: list[Message] = [*ASKED, calling("abc123450"), told("abc123450")]
    second = await inserted(stores, later, {"role": "assistant", "content": "Ten."}, evidence=evidence)
    assert second.session_id == first.session_id
    assert parent(second) == (first.record.turn_id, MatchedBy.PLACE)
    assert second.record.messages == later
    # New names again, and everything behind them is found all the same.
    anew: list[Message] = [
        *ASKED,
        calling("new1"),
        told("new1"),
        {"role": "assistant", "content": "Ten. "},
        {"role": "user", "content": "No."},
    ]
    third = await inserted(stores, anew, {"role": "assistant", "content": "Sorry."}, evidence=evidence)
    assert third.session_id == first.session_id
    assert parent(third) == (second.record.turn_id, MatchedBy.PLACE)
    version = await stores.turns.version_of_parent(stores.key, evidence, anew)
    assert version == second.record.version


@pytest.mark.parametrize("evidence", [NAMED, BY_MESSAGES])
async def test_a_reply_in_other_words_is_found_after_one_in_the_same_words(
    stores: Stores, evidence: SessionEvidence
) -> None:
    """A client keeps its own ids of calls for some requests, and then changes all of them."""

    def said(identity: str, *after: Message) -> list[Message]:
        return [*ASKED, calling(identity), told(identity), *after]

    ten: list[Message] = [{"role": "assistant", "content": "Ten."}, {"role": "user", "content": "And in Rome?"}]
    first = await inserted(stores, ASKED, calling("chatcmpl1"), evidence=evidence)
    second = await inserted(stores, said("mine1"), ten[0], evidence=evidence)
    assert parent(second) == (first.record.turn_id, MatchedBy.PLACE)
    third = await inserted(stores, said("mine1", *ten), calling("chatcmpl2", "Rome"), evidence=evidence)
    assert parent(third) == (second.record.turn_id, MatchedBy.CONTEXT)
    anew = said("new1", *ten, calling("new2", "Rome"), told("new2"))
    fourth = await inserted(stores, anew, {"role": "assistant", "content": "Eleven."}, evidence=evidence)
    assert parent(fourth) == (third.record.turn_id, MatchedBy.PLACE)


async def test_an_equal_conversation_is_found_as_such(stores: Stores) -> None:
    first = await inserted(stores, ASKED, calling("a"), evidence=NAMED)
    second = await inserted(stores, [*ASKED, calling("a"), told("a")], calling("b"), evidence=NAMED)
    assert parent(second) == (first.record.turn_id, MatchedBy.CONTEXT)
    compacted: list[Message] = [{"role": "user", "content": "Summary."}, calling("b"), told("b")]
    third = await inserted(stores, compacted, calling("c"), evidence=NAMED)
    assert parent(third) == (second.record.turn_id, MatchedBy.REPLY)


@pytest.mark.parametrize("evidence", [NAMED, BY_MESSAGES])
async def test_what_cannot_be_told_apart_is_not_found(stores: Stores, evidence: SessionEvidence) -> None:
    one = await inserted(stores, ASKED, calling("a"), evidence=evidence)
    two = await inserted(stores, ASKED, calling("b", "Rome"), evidence=evidence)
    later = await inserted(stores, [*ASKED, calling("x", "Rome"), told("x")], calling("c"), evidence=evidence)
    assert parent(later) == (None, None)
    if evidence is BY_MESSAGES:
        assert later.session_id not in (one.session_id, two.session_id)


@pytest.mark.parametrize("evidence", [NAMED, BY_MESSAGES])
async def test_a_request_that_was_cut_off_and_sent_again_is_no_other_one(
    stores: Stores, evidence: SessionEvidence
) -> None:
    cut = {"evidence": evidence, "status": TurnStatus.ABORTED}
    one = await inserted(stores, ASKED, {"role": "assistant", "content": "I lo"}, **cut)
    two = await inserted(stores, ASKED, calling("a"), **cut)
    whole = await inserted(stores, ASKED, calling("b"), evidence=evidence)
    assert {one.session_id, two.session_id} == {whole.session_id}
    later = await inserted(stores, [*ASKED, calling("x"), told("x")], calling("c"), evidence=evidence)
    assert later.session_id == whole.session_id
    assert parent(later) == (whole.record.turn_id, MatchedBy.PLACE)


async def test_other_arguments_are_another_call(stores: Stores) -> None:
    await inserted(stores, ASKED, calling("a"), evidence=NAMED)
    later = await inserted(stores, [*ASKED, calling("x", "Rome"), told("x")], calling("c"), evidence=NAMED)
    assert parent(later) == (None, None)


async def test_a_late_turn_becomes_the_parent_by_its_place(stores: Stores) -> None:
    late = turn_record(api_key_id=stores.key, messages=ASKED, response=calling("a"), evidence=NAMED)
    later = await inserted(stores, [*ASKED, calling("x"), told("x")], calling("c"), evidence=NAMED)
    assert parent(later) == (None, None)
    await stores.turns.insert(late)
    again = await stores.turns.load(later.record.turn_id)
    assert again is not None
    assert parent(again) == (late.turn_id, MatchedBy.PLACE)
    assert again.record.messages == later.record.messages


async def test_replies_are_read_only_where_one_may_stand_in_its_place(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that writes the time into its first message changes all that stands before each reply."""
    read: list[int] = []

    def counted(history: History, turns: Sequence[AskedTurn], *stored: Any) -> Placed:
        read.append(len(turns))
        return find_places(history, turns, *stored)

    monkeypatch.setattr("db.turns.session_lookup.find_places", counted)
    first = await inserted(stores, ASKED, calling("a"), evidence=NAMED)
    now: list[Message] = [{"role": "user", "content": "12:01. time in Oslo?"}, calling("a"), told("a")]
    second = await inserted(stores, now, calling("b"), evidence=NAMED)
    assert parent(second) == (first.record.turn_id, MatchedBy.REPLY)
    renamed = await inserted(stores, [*ASKED, calling("x"), told("x")], calling("c"), evidence=NAMED)
    assert parent(renamed) == (first.record.turn_id, MatchedBy.PLACE)
    assert read == ([0, 2] if isinstance(stores.turns, PostgresTurnStore) else [])


# A session in which one reply was given many times: the right turn is found, and few are read for it.

SAME_SESSION = SessionEvidence(SessionSource.HEADER, "heartbeats")
DONE: Message = {"role": "assistant", "content": "done"}
CHATS = 20  # more than are read of one reply


def asked(number: int) -> list[Message]:
    return [{"role": "user", "content": f"task {number}"}]


def turn(stores: Stores, messages: list[Message]) -> TurnRecord:
    return turn_record(api_key_id=stores.key, evidence=SAME_SESSION, messages=messages, response=DONE)


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
    request = Request(postgres_stores.key, SAME_SESSION, [*beginning, DONE])
    session = named_session_id(request.key, SAME_SESSION)

    async def find(connection: AsyncConnection) -> list[list[Candidate]]:
        return await candidates_of_many(await raw_connection(connection), PLAIN, [(session, request)])

    (candidates,) = await database.run(find)
    assert len(candidates) == read


# What each key stores is counted as turns are inserted, commented on and erased.


def kept(key: ApiKeyId, session: str, words: str, tools: list[str] | None = None) -> TurnRecord:
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
    await gateways[0].insert_many([kept(mine, "a", words), kept(other, "b", "short"), kept(mine, "c", words)])
    await asyncio.gather(*(gateway.insert(kept(mine, f"d{n}", words)) for n, gateway in enumerate(gateways)))
    of_mine, of_other = await stored(database, mine, other)
    assert 4 * (ROW_BYTES + 20_000) < of_mine < 4 * (ROW_BYTES + 21_000)
    assert ROW_BYTES < of_other < ROW_BYTES + 1000


async def test_a_turn_that_is_inserted_twice_counts_once(postgres_stores: Stores, database: Database) -> None:
    record = kept(postgres_stores.key, "a", "hello")
    await postgres_stores.turns.insert(record)
    once = await stored(database, postgres_stores.key)
    await postgres_stores.turns.insert(record)
    assert await stored(database, postgres_stores.key) == once


async def test_a_tool_list_counts_where_it_is_stored_first(postgres_stores: Stores, database: Database) -> None:
    mine, other, tools = postgres_stores.key, postgres_stores.other_key, [f"tool_{n}" for n in range(1000)]
    await postgres_stores.turns.insert_many([kept(mine, "a", "x", tools), kept(mine, "b", "x", ["another"])])
    await postgres_stores.turns.insert(kept(other, "c", "x", tools))
    of_mine, of_other = await stored(database, mine, other)
    assert of_mine > 2 * ROW_BYTES + 30_000
    assert of_other < ROW_BYTES + 1000


async def test_files_count_with_each_turn_that_adds_them(postgres_stores: Stores, database: Database) -> None:
    key, picture = postgres_stores.key, png(pixels=b"p" * 10_000)
    first, second = (replace(kept(key, session, ""), messages=[asks_about(picture)]) for session in ("a", "b"))
    await postgres_stores.turns.insert_many([first, second])
    (both,) = await stored(database, key)
    assert 2 * (ROW_BYTES + 10_000) < both < 2 * (ROW_BYTES + 11_000)
    for record in (first, second):
        await PostgresErasureStore(database).erase_turn(record.turn_id)
    assert await stored(database, key) == [0]


async def test_what_is_erased_gives_its_room_back(postgres_stores: Stores, database: Database) -> None:
    key, erasures = postgres_stores.key, PostgresErasureStore(database)
    first, second = kept(key, "a", "x" * 5000), kept(key, "b", "y" * 5000, ["tool"])
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
        await postgres_stores.turns.insert(kept(mine, f"m{n}", "x"))
    await postgres_stores.turns.insert(kept(other, "o", "x"))
    before = await stored(database, mine, other)
    sweep = PostgresSweepStore(database)
    await asyncio.gather(*(sweep.merge_stored_bytes() for _ in range(4)))
    with psycopg.connect(postgres_url) as connection:
        rows = connection.execute("SELECT count(*) FROM stored_bytes GROUP BY api_key_id").fetchall()
    assert rows == [(1,), (1,)]
    assert await stored(database, mine, other) == before
    assert await sweep.merge_stored_bytes() == 0
