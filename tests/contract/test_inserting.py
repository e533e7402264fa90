"""Inserting turns: many at once, under a chosen policy, overtaken, after a begun reply."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.turns import InsertedTurn, Message, SessionEvidence, SessionSource, TurnOutcome, TurnRecord
from clawloop.core.errors import ContentUnreadable, RecordUnusable, StoreTimedOut
from clawloop.core.ids import TurnId, new_api_key_id
from clawloop.core.turns.canonical import History
from db.database import CHAT_LIMIT, Database
from db.turns import prepared_turn
from db.turns.insert import PostgresTurnStore, insert_batch
from db.turns.prepared_turn import PreparedTurn
from db.turns.read import ConversationCache
from tests.chats import assistant, user
from tests.contract.conftest import Stores
from tests.contract.ledgers import Ledger, postgres_ledger
from tests.fakes.turn_store import FakeTurnStore
from tests.records import turn_record

__all__ = ["postgres_ledger"]


# Inserting many turns at once: the same result as one by one, in any order, from two gateways, beside bad turns.

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


# Turns of one key under a policy that a header chose, on the fake and on PostgreSQL.

POLICIES = ("default", "anna")


def asked(stores: Stores, policy: str, name: str | None, *before: str) -> TurnRecord:
    source = SessionSource.CONVERSATION if name is None else SessionSource.HEADER
    chosen = None if policy == "default" else policy
    messages = [message for text in before for message in (user(text), assistant("hello"))]
    return turn_record(
        api_key_id=stores.key,
        policy=policy,
        evidence=SessionEvidence(source, name, policy=chosen),
        messages=[*messages, user("next" if before else "one")],
    )


@pytest.fixture
async def both(stores: Stores) -> Stores:
    """Stores with the policies `default`, which is the keys' own, and `anna`."""
    await stores.add_policy("anna")
    return stores


@pytest.mark.parametrize("name", ["s", None], ids=["named session", "conversation"])
async def test_the_same_conversation_is_a_session_of_each_policy(both: Stores, name: str | None) -> None:
    first = {policy: asked(both, policy, name) for policy in POLICIES}
    begun = {policy: await both.turns.insert(turn) for policy, turn in first.items()}
    sessions = {policy: turn.session_id for policy, turn in begun.items()}
    assert len(set(sessions.values())) == 2
    for policy in reversed(POLICIES):
        turn = asked(both, policy, name, "one")
        assert await both.turns.version_of_parent(both.key, turn.evidence, turn.messages) == 0
        goes_on = await both.turns.insert(turn)
        assert (goes_on.session_id, goes_on.parent_turn_id) == (sessions[policy], first[policy].turn_id)
        found = await both.turns.load(turn.turn_id)
        assert found is not None
        assert (found.record.policy, found.record.evidence) == (policy, turn.evidence)
        view = await both.sessions.session(sessions[policy])
        assert view is not None
        assert (view.policy, view.key_id, view.external_id) == (policy, both.key, name)


async def test_both_in_one_batch_are_two_sessions(both: Stores) -> None:
    turns = [asked(both, policy, name) for name in ("s", None) for policy in POLICIES]
    inserted = await both.turns.insert_many(turns)
    assert len({turn.session_id for turn in inserted if isinstance(turn, InsertedTurn)}) == 4


async def test_a_conversation_known_to_one_policy_begins_anew_under_the_other(both: Stores) -> None:
    await both.turns.insert(asked(both, "default", None))
    moved = await both.turns.insert(asked(both, "anna", None, "one"))
    view = await both.sessions.session(moved.session_id)
    assert view is not None
    assert (view.policy, view.main_turns, moved.parent_turn_id) == ("anna", 1, None)


async def test_a_late_parent_is_found_by_the_turn_of_its_policy(both: Stores) -> None:
    turns = {policy: (asked(both, policy, None), asked(both, policy, None, "one")) for policy in POLICIES}
    for _, later in turns.values():
        await both.turns.insert(later)
    for policy, (first, later) in turns.items():
        late = await both.turns.insert(first)
        found = await both.turns.load(later.turn_id)
        assert found is not None
        assert (found.session_id, found.parent_turn_id) == (late.session_id, first.turn_id), policy


async def test_feedback_by_name_stays_with_the_policy(both: Stores) -> None:
    turns = {policy: asked(both, policy, "s") for policy in POLICIES}
    sessions = {policy: (await both.turns.insert(turn)).session_id for policy, turn in turns.items()}
    for policy, turn in turns.items():
        for name, number in (("s", 1), ("s", None), (None, None)):
            assert await both.feedback.turn_of(both.key, policy, name, number) == turn.turn_id, (policy, name)
        # Our own id names one session, whichever policy is meant.
        assert await both.feedback.turn_of(both.key, "default", str(sessions[policy]), 1) == turn.turn_id
    assert await both.feedback.turn_of(both.key, "berta", "s", 1) is None
    assert await both.feedback.give_outcome(both.key, "berta", "s", 1) is None
    for policy in POLICIES:
        assert await both.feedback.give_outcome(both.key, policy, "s", 1) is not None
    assert await both.feedback.give_outcome(both.key, "berta", str(sessions["anna"]), -1) is not None


async def test_an_erasure_takes_the_session_of_one_policy(both: Stores) -> None:
    own, chosen = asked(both, "default", "s"), asked(both, "anna", "s")
    sessions = [(await both.turns.insert(turn)).session_id for turn in (own, chosen)]
    await both.erasures.erase_session(sessions[1])
    erased, kept = await both.turns.load(chosen.turn_id), await both.turns.load(own.turn_id)
    assert erased is not None
    assert kept is not None
    assert (erased.outcome, kept.outcome) == (TurnOutcome.ERASED, TurnOutcome.WAITING)
    assert erased.record.evidence == SessionEvidence(SessionSource.HEADER, None, policy="anna")
    assert kept.record.messages == own.messages


async def test_a_turn_of_an_erased_session_keeps_its_policy_alone(both: Stores) -> None:
    late, first = asked(both, "anna", "s"), asked(both, "anna", "s")
    session = (await both.turns.insert(first)).session_id
    await both.erasures.erase_session(session)
    inserted = await both.turns.insert(late)
    found = await both.turns.load(late.turn_id)
    assert found is not None
    assert (inserted.session_id, inserted.erased) == (session, True)
    assert found.record.evidence == SessionEvidence(SessionSource.HEADER, None, policy="anna")


# Turns that were stored or signalled after the turn that follows them, and are judged by it all the same.


async def test_a_turn_whose_transaction_began_first_and_ended_last_was_overtaken(postgres_ledger: Ledger) -> None:
    """What follows it was signalled, and judged what is above both; only the late turn itself can judge it now."""
    ledger = postgres_ledger
    first, second, third = ledger.talk("one", "two", "three")
    await ledger.insert(first, second, third)

    async def overtaken_by() -> frozenset[TurnId]:
        context = await ledger.judgements.load_context(second.turn_id)
        assert context is not None
        return context.overtaken_by

    assert await overtaken_by() == frozenset()
    await ledger.stores.turns.mark_notified([third.turn_id], timedelta(0))
    assert await overtaken_by() == {third.turn_id}
    await ledger.stores.turns.mark_notified([second.turn_id], timedelta(0))
    assert await overtaken_by() == {third.turn_id}


async def test_a_turn_is_not_overtaken_by_one_that_is_signalled_with_it_or_later(postgres_ledger: Ledger) -> None:
    ledger = postgres_ledger
    first, second, third = ledger.talk("one", "two", "three")
    await ledger.insert(first, second, third)
    await ledger.stores.turns.mark_notified([second.turn_id], timedelta(0))
    await ledger.stores.turns.mark_notified([third.turn_id], timedelta(0))
    context = await ledger.judgements.load_context(second.turn_id)
    assert context is not None
    assert context.overtaken_by == frozenset()


# Replies that a client began, in memory and in PostgreSQL: the next request has both parts as one message.

SAMPLING: dict[str, JsonValue] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
GOES_ON: dict[str, JsonValue] = SAMPLING | {"continue_final_message": True}
ASKED: Message = {"role": "user", "content": "Name a colour."}


@pytest.mark.parametrize(
    "begun", ["The colour is: ", [{"type": "text", "text": "The colour is: "}]], ids=["text", "parts"]
)
async def test_the_next_request_follows_a_reply_that_its_client_began(stores: Stores, begun: JsonValue) -> None:
    messages: list[Message] = [ASKED, {"role": "assistant", "content": begun}]
    evidence = SessionEvidence(SessionSource.CONVERSATION, None)
    first = turn_record(
        api_key_id=stores.key,
        evidence=evidence,
        messages=messages,
        response={"role": "assistant", "content": "red."},
        sampling=GOES_ON,
    )
    said: Message = {"role": "assistant", "content": "The colour is: red."}
    second = turn_record(
        api_key_id=stores.key, evidence=evidence, messages=[ASKED, said, {"role": "user", "content": "Another."}]
    )
    one, two = await stores.turns.insert(first), await stores.turns.insert(second)
    assert two.session_id == one.session_id
    assert two.parent_turn_id == first.turn_id
    stored = await stores.turns.load(second.turn_id)
    assert stored is not None
    assert stored.record.messages == second.messages
    assert await stores.turns.version_of_parent(stores.key, evidence, second.messages) == first.version


async def test_without_the_setting_an_assistants_last_message_is_one_of_its_own(stores: Stores) -> None:
    messages: list[Message] = [ASKED, {"role": "assistant", "content": "Red."}]
    evidence = SessionEvidence(SessionSource.HEADER, "s")
    first = turn_record(
        api_key_id=stores.key,
        evidence=evidence,
        messages=messages,
        response={"role": "assistant", "content": "Or blue."},
        sampling=SAMPLING,
    )
    joined: list[Message] = [ASKED, {"role": "assistant", "content": "Red.Or blue."}, ASKED]
    apart: list[Message] = [*messages, {"role": "assistant", "content": "Or blue."}, ASKED]
    await stores.turns.insert(first)
    parents = []
    for following in (joined, apart):
        turn = turn_record(api_key_id=stores.key, evidence=evidence, messages=following)
        parents.append((await stores.turns.insert(turn)).parent_turn_id)
    assert parents == [None, first.turn_id]
