"""Replies that come back in other words are found by their place, in memory and in PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import JsonValue

from clawloop.core.contracts.turns import MatchedBy, Message, SessionEvidence, SessionSource, StoredTurn, TurnRecord
from clawloop.core.ids import TurnId
from clawloop.core.turns.canonical import History
from clawloop.core.turns.places import AskedTurn, Placed, find_places
from db.turns.insert import PostgresTurnStore
from tests.contract.conftest import Stores
from tests.records import turn_record

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
