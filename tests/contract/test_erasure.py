"""Content is erased for good, bare turns stay; turns in flight during an erasure are stored bare."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest

from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource, TurnOutcome, TurnRecord
from clawloop.core.ids import SessionId, TurnId, new_turn_id
from tests.contract.conftest import Stores
from tests.records import turn_record

NAMED = SessionEvidence(SessionSource.HEADER, "s")
NAMELESS = SessionEvidence(SessionSource.CONVERSATION, None)


def conversation(stores: Stores, *questions: str, evidence: SessionEvidence = NAMED) -> list[TurnRecord]:
    messages: list[Message] = []
    turns: list[TurnRecord] = []
    for question in questions:
        messages = [*messages, {"role": "user", "content": question}]
        answer: Message = {"role": "assistant", "content": f"about {question}"}
        turns.append(turn_record(api_key_id=stores.key, evidence=evidence, messages=messages, response=answer))
        messages = [*messages, answer]
    return turns


async def insert(stores: Stores, *turns: TurnRecord) -> SessionId:
    return [(await stores.turns.insert(turn)).session_id for turn in turns][-1]


async def is_bare(stores: Stores, turn: TurnRecord) -> bool:
    stored = await stores.turns.load(turn.turn_id)
    assert stored is not None
    known = stored.record
    content = (known.messages, known.tools, known.response, known.prompt_ids, known.response_ids, known.logprobs)
    whole = known == turn
    bare = not any(content) and not known.sampling and known.evidence.value is None
    assert whole is not bare
    assert bare is (stored.outcome is TurnOutcome.ERASED)
    return bare


async def test_a_session_loses_all_content_and_keeps_its_turns(stores: Stores) -> None:
    turns = conversation(stores, "one", "two", "three")
    other = conversation(stores, "one", evidence=SessionEvidence(SessionSource.HEADER, "other"))
    session = await insert(stores, *turns)
    await insert(stores, *other)
    assert not any([await is_bare(stores, turn) for turn in turns])
    erasure = await stores.erasures.erase_session(session)
    assert erasure is not None
    assert (erasure.session.session_id, erasure.session.policy, erasure.turns) == (session, "default", 3)
    assert erasure.message.whole
    assert erasure.message.turns == tuple(turn.turn_id for turn in reversed(turns))
    assert all([await is_bare(stores, turn) for turn in turns])
    assert not await is_bare(stores, *other)
    assert [(view.outcome, view.why) for view in await stores.sessions.turns(session)] == [("erased", "erased")] * 3


async def test_erasing_is_idempotent(stores: Stores) -> None:
    (turn,) = conversation(stores, "one")
    session = await insert(stores, turn)
    first = await stores.erasures.erase_session(session)
    again = await stores.erasures.erase_session(session)
    assert first is not None
    assert again is not None
    assert (first.turns, again.turns) == (1, 0)
    assert first.message == again.message  # a workflow that missed the first message gets the same one


async def test_erasing_an_unknown_session_or_turn_is_none(stores: Stores) -> None:
    assert await stores.erasures.erase_session(SessionId(uuid4())) is None
    assert await stores.erasures.erase_turn(new_turn_id()) is None


async def test_a_turn_is_erased_with_all_turns_that_hold_its_content_and_no_others(stores: Stores) -> None:
    first, second, third = conversation(stores, "one", "two", "three")
    regenerated = replace(second, turn_id=new_turn_id(), response={"role": "assistant", "content": "another reply"})
    session = await insert(stores, first, second, third, regenerated)
    erasure = await stores.erasures.erase_turn(second.turn_id)
    assert erasure is not None
    assert (erasure.turns, erasure.message.whole) == (3, False)
    assert erasure.message.turns == (regenerated.turn_id, third.turn_id, second.turn_id)
    bare = [await is_bare(stores, turn) for turn in (first, second, third, regenerated)]
    assert bare == [False, True, True, True]
    # Once more from there reaches what continues it, and finds nothing left.
    again = await stores.erasures.erase_turn(second.turn_id)
    assert again is not None
    assert (again.turns, again.session.session_id) == (0, session)


@pytest.mark.parametrize("begun", [False, True], ids=["first", "later"])
async def test_a_turn_is_erased_with_one_that_continues_it_after_an_abort(stores: Stores, begun: bool) -> None:
    before, stopped = conversation(stores, "one", "two")
    if begun:
        await insert(stores, before)
    messages = stopped.messages if begun else before.messages
    stopped = replace(stopped, messages=messages, response={"role": "assistant", "content": "abo"})
    goes_on = replace(stopped, turn_id=new_turn_id(), messages=[*messages, {"role": "user", "content": "three"}])
    beside = replace(
        stopped,
        turn_id=new_turn_id(),
        messages=[*messages[:-1], {"role": "user", "content": f"{messages[-1]['content']}!"}],
    )
    await insert(stores, stopped, goes_on, beside)
    erasure = await stores.erasures.erase_turn(stopped.turn_id)
    assert erasure is not None
    assert erasure.message.turns == (goes_on.turn_id, stopped.turn_id)
    assert [await is_bare(stores, turn) for turn in (stopped, goes_on, beside)] == [True, True, False]


@pytest.mark.parametrize("evidence", [NAMED, NAMELESS], ids=["named", "nameless"])
async def test_a_turn_in_flight_while_its_session_was_erased_is_stored_bare(
    stores: Stores, evidence: SessionEvidence
) -> None:
    first, second, third = conversation(stores, "one", "two", "three", evidence=evidence)
    session = await insert(stores, first)
    await stores.erasures.erase_session(session)
    inserted = await stores.turns.insert(second)  # e.g. from a spool: it began before
    assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, None, True)
    assert await is_bare(stores, second)
    # What a client says afterwards is new, also where it says the same again.
    later = replace(third, started_at=third.started_at + timedelta(hours=1))
    inserted = await stores.turns.insert(later)
    assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, None, False)
    assert not await is_bare(stores, later)


@pytest.mark.parametrize("evidence", [NAMED, NAMELESS], ids=["named", "nameless"])
async def test_a_turn_that_continues_an_erased_one_and_began_before_is_stored_bare(
    stores: Stores, evidence: SessionEvidence
) -> None:
    first, second, third, fourth = conversation(stores, "one", "two", "three", "four", evidence=evidence)
    regenerated = replace(second, turn_id=new_turn_id(), response={"role": "assistant", "content": "another reply"})
    session = await insert(stores, first, second)
    await stores.erasures.erase_turn(second.turn_id)
    for on_its_way in (third, regenerated, fourth):  # e.g. an engine is still answering
        inserted = await stores.turns.insert(on_its_way)
        assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, None, True)
        assert await is_bare(stores, on_its_way)
    assert not await is_bare(stores, first)
    later = replace(third, turn_id=new_turn_id(), started_at=third.started_at + timedelta(hours=1))
    inserted = await stores.turns.insert(later)
    assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, first.turn_id, False)
    assert not await is_bare(stores, later)


async def test_a_turn_of_another_branch_than_an_erased_one_keeps_its_content(stores: Stores) -> None:
    first, second = conversation(stores, "one", "two")
    _, beside = conversation(stores, "one", "something else")
    session = await insert(stores, first, second)
    await stores.erasures.erase_turn(second.turn_id)
    inserted = await stores.turns.insert(beside)
    assert (inserted.session_id, inserted.parent_turn_id, inserted.erased) == (session, first.turn_id, False)


async def test_a_late_turn_does_not_become_the_parent_of_erased_ones(stores: Stores) -> None:
    late, first, second = conversation(stores, "one", "two", "three")
    await insert(stores, first, second)
    await stores.erasures.erase_turn(first.turn_id)
    inserted = await stores.turns.insert(late)
    assert not inserted.erased
    assert not await is_bare(stores, late)
    assert [await is_bare(stores, turn) for turn in (first, second)] == [True, True]


async def test_an_erased_turn_cannot_be_rated(stores: Stores) -> None:
    (turn,) = conversation(stores, "one")
    session = await insert(stores, turn)
    assert await stores.feedback.give(stores.key, turn.turn_id, 1.0, None) is not None
    await stores.erasures.erase_session(session)
    assert await stores.feedback.give(stores.key, turn.turn_id, None, "words") is None


async def test_a_session_that_continues_after_erasure_has_its_name_again(stores: Stores) -> None:
    first, second = conversation(stores, "one", "two")
    session = await insert(stores, first)
    await stores.erasures.erase_session(session)
    later = replace(second, started_at=second.started_at + timedelta(hours=1))
    await insert(stores, later)
    assert await stores.feedback.turn_of(stores.key, "default", "s", 2) == TurnId(later.turn_id)
