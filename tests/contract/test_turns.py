"""Inserting turns and reading them back, in memory and in PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import struct
from datetime import timedelta
from typing import Any

import pytest

from clawloop.core.contracts.turns import (
    Message,
    SessionEvidence,
    SessionSource,
    TurnKind,
    TurnOutcome,
    TurnRecord,
    TurnStatus,
)
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import SessionId, TurnId, new_turn_id
from tests.contract.conftest import Stores
from tests.records import turn_record

NAMED = SessionEvidence(SessionSource.HEADER, "chat-1")
BY_MESSAGES = SessionEvidence(SessionSource.CONVERSATION, None)


def message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def conversation(
    stores: Stores, *asked: str, evidence: SessionEvidence = BY_MESSAGES, answers: bool = True
) -> list[TurnRecord]:
    """Turns that follow each other: each request holds all before it; without `answers` the replies are empty."""
    turns: list[TurnRecord] = []
    messages = [message("system", "Be kind.")]
    tokens = [1, 2, 3]
    for number, text in enumerate(asked):
        messages = [*messages, message("user", text)]
        answer = message("assistant", f"answer {number} to {text}" if answers else "")
        tokens = [*tokens, 100 + number, 101 + number]
        reply = [200 + number, 201, 202]
        turns.append(
            turn_record(
                api_key_id=stores.key,
                evidence=evidence,
                messages=messages,
                response=answer,
                prompt_ids=tokens,
                response_ids=reply,
                logprobs=[-0.5, -0.25, -0.125],
                version=number,
            )
        )
        messages = [*messages, answer]
        tokens = [*tokens, *reply]
    return turns


async def insert_all(stores: Stores, turns: list[TurnRecord]) -> None:
    for turn in turns:
        await stores.turns.insert(turn)


async def parents(stores: Stores, turns: list[TurnRecord]) -> list[TurnId | None]:
    found = []
    for turn in turns:
        stored = await stores.turns.load(turn.turn_id)
        assert stored is not None
        assert_same(stored.record, turn)
        assert await stores.turns.parent_of(turn.turn_id) == stored.parent_turn_id
        found.append(stored.parent_turn_id)
    return found


async def sessions(stores: Stores, turns: list[TurnRecord]) -> set[SessionId]:
    stored = [await stores.turns.load(turn.turn_id) for turn in turns]
    return {turn.session_id for turn in stored if turn is not None}


def assert_same(stored: TurnRecord, inserted: TurnRecord) -> None:
    """Equal also where Python is generous: 1, 1.0 and True, or the order of keys."""
    assert stored == inserted
    for field in ("messages", "tools", "response", "sampling", "logprobs"):
        assert json.dumps(getattr(stored, field)) == json.dumps(getattr(inserted, field)), field


# Exactness ----------------------------------------------------------------------------------------------------------


async def test_every_field_reads_back_as_inserted(stores: Stores) -> None:
    record = turn_record(
        api_key_id=stores.key,
        evidence=SessionEvidence(SessionSource.CONVERSATION, None, ("user=ann\0", "prompt_cache_key=\ud800")),
        messages=[
            {"role": "system", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "NUL \0, half a pair \ud83d, ☃ 😀, \u2028"}]},
            {"z": 1, "a": 1.0, "role": "user", "content": "", "b": True, "big": 2**80, "small": 5e-324, "zero": -0.0},
            {"role": "user", "content": "", "": {"deep": [[[[[{}]]]]]}},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"y": {}, "x": [1, 1.0, None]}}}],
        response={"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"arguments": "{}"}}]},
        sampling={"top_k": -1, "temperature": 0.6, "stop": ["\0"], "seed": None},
        response_ids=[0, 151_642],
        logprobs=[-0.0, -1e-45],
        error="it said \0",
        finish_reason=None,
        status=TurnStatus.ABORTED,
        ends_session=True,
    )

    await stores.turns.insert(record)

    stored = await stores.turns.load(record.turn_id)
    assert stored is not None
    error = stored.record.error
    assert error is not None
    assert error.startswith("it said ")  # for people to read; PostgreSQL's text holds no NUL
    assert_same(stored.record, _with(record, error=error))
    assert math.copysign(1, _logprobs(stored.record)[0]) == -1
    assert stored.announced_at is None


async def test_unknown_values_stay_none(stores: Stores) -> None:
    record = turn_record(
        api_key_id=stores.key, prompt_ids=None, response_ids=None, logprobs=None, tools=None, engine_id=None
    )
    empty = turn_record(api_key_id=stores.key, messages=[], prompt_ids=[], response_ids=[], logprobs=[], tools=[])

    await insert_all(stores, [record, empty])

    assert await parents(stores, [record, empty]) == [None, None]


async def test_log_probs_read_back_bit_exactly(stores: Stores) -> None:
    printed = "[-0.10536054521799088, -1.1920928244535389e-07, -9999.0, -17.328680038452148]"  # float32 as doubles
    finer = [-0.1, math.log(0.3), -1e-300]  # no float32 is one of these

    for logprobs in (json.loads(printed), finer):
        record = turn_record(api_key_id=stores.key, response_ids=[1] * len(logprobs), logprobs=logprobs)
        await stores.turns.insert(record)
        stored = await stores.turns.load(record.turn_id)
        assert stored is not None
        assert [struct.pack("d", value) for value in _logprobs(stored.record)] == [
            struct.pack("d", value) for value in logprobs
        ]


@pytest.mark.parametrize(
    "broken",
    [
        {"messages": [{"role": "user", "content": "x", "n": math.inf}]},
        {"response": {"role": "assistant", "content": "x", "n": math.nan}},
        {"prompt_ids": [2**31]},
    ],
)
async def test_an_unstorable_record_is_rejected_and_leaves_no_rows(stores: Stores, broken: dict[str, Any]) -> None:
    record = turn_record(api_key_id=stores.key, **broken)

    with pytest.raises(RecordUnusable):
        await stores.turns.insert(record)

    assert await stores.turns.load(record.turn_id) is None


async def test_an_unknown_turn_is_none(stores: Stores) -> None:
    assert await stores.turns.load(new_turn_id()) is None


# Sessions -----------------------------------------------------------------------------------------------------------


async def test_a_name_is_one_session_for_each_key(stores: Stores) -> None:
    first = await stores.turns.insert(turn_record("a", api_key_id=stores.key, evidence=NAMED))
    again = await stores.turns.insert(turn_record("b", api_key_id=stores.key, evidence=NAMED))
    other = await stores.turns.insert(turn_record("a", api_key_id=stores.other_key, evidence=NAMED))

    assert first.session_id == again.session_id
    assert other.session_id != first.session_id


async def test_a_continued_conversation_stays_in_its_session(stores: Stores) -> None:
    first, second, third = conversation(stores, "one", "two", "three")
    await insert_all(stores, [first, second, third])

    assert len(await sessions(stores, [first, second, third])) == 1
    assert await parents(stores, [first, second, third]) == [None, first.turn_id, second.turn_id]


async def test_two_conversations_that_begin_alike_are_two_sessions(stores: Stores) -> None:
    (first,) = conversation(stores, "hello")
    (second,) = conversation(stores, "hello")
    await insert_all(stores, [first, second])

    assert len(await sessions(stores, [first, second])) == 2


async def test_a_retry_after_a_broken_reply_stays_in_the_session(stores: Stores) -> None:
    (broken,) = conversation(stores, "hello")
    broken = _with(broken, status=TurnStatus.ABORTED, response=None)
    (again,) = conversation(stores, "hello")
    await insert_all(stores, [broken, again])

    assert len(await sessions(stores, [broken, again])) == 1


async def test_an_edited_history_is_a_branch_of_the_same_session(stores: Stores) -> None:
    first, second, _ = turns = conversation(stores, "one", "two", "three")
    edited = _with(turns[1], turn_id=new_turn_id(), messages=[*turns[1].messages[:-1], message("user", "TWO")])
    await insert_all(stores, [*turns, edited])

    assert len(await sessions(stores, [*turns, edited])) == 1
    assert await parents(stores, [second, edited]) == [first.turn_id, first.turn_id]


async def test_two_keys_never_share_a_conversation(stores: Stores) -> None:
    first, second = conversation(stores, "one", "two")
    second = _with(second, api_key_id=stores.other_key)
    await insert_all(stores, [first, second])

    assert len(await sessions(stores, [first, second])) == 2
    assert await parents(stores, [second]) == [None]


async def test_a_common_greeting_finds_the_newest_repetition(stores: Stores) -> None:
    many = [turn for _ in range(40) for turn in conversation(stores, "hello")]
    broken = _with(conversation(stores, "hello")[0], status=TurnStatus.ERROR, response=None, error="gone")
    (again,) = conversation(stores, "hello")
    await insert_all(stores, [*many, broken, again])

    assert len(await sessions(stores, [broken, again])) == 1
    assert len(await sessions(stores, many)) == 40


# Parents ------------------------------------------------------------------------------------------------------------


async def test_choices_of_one_request_share_session_and_parent(stores: Stores) -> None:
    first, second = conversation(stores, "one", "two")
    # The second choice's answer stands in the request as well: it must not follow its own sibling.
    choices = [
        _with(second, turn_id=new_turn_id(), choice=number, response=response)
        for number, response in enumerate(
            [first.response, message("assistant", "other"), message("assistant", "third")]
        )
    ]
    choices = [_with(choice, group_id=choices[0].turn_id) for choice in choices]
    await insert_all(stores, [first, *choices])

    assert await parents(stores, choices) == [first.turn_id] * 3
    assert len(await sessions(stores, [first, *choices])) == 1


async def test_choices_of_a_first_request_share_a_new_session(stores: Stores) -> None:
    (first,) = conversation(stores, "one")
    other = _with(first, turn_id=new_turn_id(), group_id=first.turn_id, choice=1, response=message("assistant", "b"))
    first = _with(first, group_id=first.turn_id)
    await insert_all(stores, [other, first])

    assert len(await sessions(stores, [first, other])) == 1


async def test_the_version_of_the_parent_is_found(stores: Stores) -> None:
    first, second, third = conversation(stores, "one", "two", "three")
    await insert_all(stores, [first, second])
    ask = stores.turns.version_of_parent

    assert await ask(stores.key, BY_MESSAGES, third.messages) == second.version == 1
    assert await ask(stores.key, BY_MESSAGES, second.messages) == first.version == 0
    assert await ask(stores.key, BY_MESSAGES, first.messages) is None
    assert await ask(stores.other_key, BY_MESSAGES, third.messages) is None
    assert await ask(stores.key, NAMED, third.messages) is None


# Outcomes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "outcome", "detail"),
    [
        ({}, TurnOutcome.WAITING, None),
        ({"status": TurnStatus.ABORTED, "finish_reason": None}, TurnOutcome.WAITING, None),
        ({"kind": TurnKind.SIDE, "kind_reason": "heartbeat"}, TurnOutcome.SIDE, "heartbeat"),
        (
            {"status": TurnStatus.ERROR, "error": "engine gone", "response": None},
            TurnOutcome.NOT_TRAINABLE,
            "no reply: engine gone",
        ),
        ({"status": TurnStatus.ABORTED, "response": None}, TurnOutcome.NOT_TRAINABLE, "no reply: aborted"),
    ],
)
async def test_the_outcome_of_a_turn_on_insertion(
    stores: Stores, changes: dict[str, Any], outcome: TurnOutcome, detail: str | None, request: pytest.FixtureRequest
) -> None:
    record = turn_record(api_key_id=stores.key, **changes)
    await stores.turns.insert(record)
    if request.node.callspec.params["stores"] == "encrypted" and record.error is not None:
        detail = "no reply: error"  # reasons are plain text, and an engine's error may quote what it was asked

    stored = await stores.turns.load(record.turn_id)
    assert stored is not None
    assert (stored.outcome, stored.outcome_detail) == (outcome, detail)


# Twice, at once, late -----------------------------------------------------------------------------------------------


async def test_inserting_a_turn_is_idempotent(stores: Stores) -> None:
    first, second = conversation(stores, "one", "two")
    await stores.turns.insert(first)
    inserted = await stores.turns.insert(second)

    again = await stores.turns.insert(second)

    assert not inserted.duplicate
    assert again.duplicate
    assert not again.opens_session
    assert (again.session_id, again.parent_turn_id) == (inserted.session_id, inserted.parent_turn_id)


@pytest.mark.parametrize("evidence", [NAMED, BY_MESSAGES])
async def test_concurrent_inserts_of_a_turn_store_it_once(stores: Stores, evidence: SessionEvidence) -> None:
    (record,) = conversation(stores, "one", evidence=evidence)

    inserted = await asyncio.gather(*(stores.turns.insert(record) for _ in range(6)))

    assert sorted(place.duplicate for place in inserted) == [False, *[True] * 5]
    assert len({place.session_id for place in inserted}) == 1


async def test_concurrent_turns_of_a_new_session_are_all_inserted(stores: Stores) -> None:
    turns = conversation(stores, *"abcdef", evidence=NAMED)

    await asyncio.gather(*(stores.turns.insert(turn) for turn in reversed(turns)))

    assert await parents(stores, turns) == [None, *(turn.turn_id for turn in turns[:-1])]


@pytest.mark.parametrize("named", [True, False])
async def test_turns_find_their_parents_in_any_order_of_insertion(stores: Stores, named: bool) -> None:
    for order in itertools.permutations(range(4)):
        name = str(order)
        evidence = SessionEvidence(SessionSource.HEADER, name) if named else BY_MESSAGES
        turns = conversation(stores, f"one {name}", "two", "three", "four", evidence=evidence)

        await insert_all(stores, [turns[place] for place in order])

        assert await parents(stores, turns) == [None, turns[0].turn_id, turns[1].turn_id, turns[2].turn_id], order
        assert len(await sessions(stores, turns)) == 1, order


@pytest.mark.parametrize("late", [True, False])
async def test_a_turn_may_follow_replies_without_text(stores: Stores, late: bool) -> None:
    turns = conversation(stores, "one", "two", "three", evidence=NAMED, answers=False)
    for turn in turns if not late else (turns[1], turns[0], turns[2]):
        await stores.turns.insert(turn)
    assert await parents(stores, turns) == [None, turns[0].turn_id, turns[1].turn_id]


async def test_a_late_turn_becomes_the_parent_of_its_continuations_only(stores: Stores) -> None:
    first, second, third = conversation(stores, "one", "two", "three", evidence=NAMED)
    retried = _with(second, turn_id=new_turn_id(), response=message("assistant", "another answer"))
    unrelated = turn_record("something else", api_key_id=stores.key, evidence=NAMED)
    await insert_all(stores, [first, third, retried, unrelated])
    assert await parents(stores, [third]) == [first.turn_id]

    await stores.turns.insert(second)

    assert await parents(stores, [third, retried, unrelated]) == [second.turn_id, first.turn_id, None]


def _with(record: TurnRecord, **changes: Any) -> TurnRecord:
    if changes.get("response", record.response) is None:
        changes |= {"response_ids": None, "logprobs": None}
    return turn_record(**{field: getattr(record, field) for field in record.__slots__} | changes)


def _logprobs(record: TurnRecord) -> list[float]:
    assert record.logprobs is not None
    return record.logprobs


async def test_the_first_notification_time_of_a_turn_is_kept(stores: Stores) -> None:
    first, second = conversation(stores, "a", "b")
    await insert_all(stores, [first, second])
    await stores.turns.mark_notified([first.turn_id], timedelta(0))
    once = await stores.turns.load(first.turn_id)
    await stores.turns.mark_notified([first.turn_id, second.turn_id], timedelta(0))
    again, other = await stores.turns.load(first.turn_id), await stores.turns.load(second.turn_id)
    assert once is not None
    assert again is not None
    assert other is not None
    assert once.announced_at == again.announced_at is not None
    assert other.announced_at is not None
