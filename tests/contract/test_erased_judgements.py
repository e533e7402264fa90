"""Judgements whose evidence was erased, in memory and in PostgreSQL alike."""

from __future__ import annotations

from datetime import timedelta

import pytest

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.errors import RecordUnusable
from clawloop.core.judging.voting import HintVote
from tests.contract.ledgers import GOOD, TIE, Ledger, fake_ledger, ledger, postgres_ledger

__all__ = ["fake_ledger", "ledger", "postgres_ledger"]

NOW = timedelta(0)


async def test_an_answer_is_not_stored_once_the_next_state_is_erased(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    ledger.erase(second.turn_id)
    await ledger.judgements.store_votes(opened.id, [(0, "1", 1)])
    await ledger.judgements.store_direct_vote(opened.id, {1: -0.1, 0: -3.0, -1: -4.0}, 1)
    await ledger.judgements.store_hints(opened.id, "hint", [(0, "h", HintVote(True, "words of it"))])
    with pytest.raises(RecordUnusable, match=f"{second.turn_id} was erased"):
        await ledger.judgements.finalize(opened.id, GOOD, [])
    for open_it in (ledger.judgements.open, ledger.judgements.revise):
        with pytest.raises(RecordUnusable, match=f"{second.turn_id} was erased"):
            await open_it(first.turn_id, second.turn_id, b"e", "hint")
    seen = await ledger.judgements.open(first.turn_id, None, b"e", "hint")
    assert (seen.votes, seen.direct, seen.hints) == ({}, None, {})
    assert (await ledger.outcome_of(first))[0] is TurnOutcome.WAITING
    assert ledger.samples(first.turn_id) == []


async def test_a_rating_after_the_next_state_was_erased_gets_a_judgement_of_its_own(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.open(first.turn_id, second.turn_id, b"e", "hint")
    await ledger.judgements.finalize(opened.id, TIE, [])
    ledger.erase(second.turn_id)
    given = await ledger.give(first.turn_id, 1.0, None)
    amended = await ledger.judgements.revise(first.turn_id, None, b"e", "hint")
    assert amended.id != opened.id
    await ledger.judgements.finalize(amended.id, GOOD, [given])
    assert await ledger.samples_of(first) == [1.0]


async def test_a_judgement_opened_without_a_next_state_never_gets_one(ledger: Ledger) -> None:
    first, second = ledger.talk("one", "two")
    await ledger.insert(first, second)
    opened = await ledger.judgements.revise(first.turn_id, None, b"e", "hint")
    await ledger.judgements.store_votes(opened.id, [(0, "1", 1)])
    later = await ledger.judgements.revise(first.turn_id, second.turn_id, b"e", "hint")
    assert (later.id != opened.id, later.votes) == (True, {})
    assert (await ledger.judgements.revise(first.turn_id, second.turn_id, b"e", "hint")).id == later.id
    await ledger.judgements.finalize(later.id, GOOD, [])
    context = await ledger.judgements.load_context(first.turn_id)
    assert context is not None
    assert context.current is not None
    assert context.current.next_turn_id == second.turn_id


async def test_a_turn_erased_before_its_workflow_was_notified_is_never_notified(ledger: Ledger) -> None:
    first, second, third = ledger.talk("one", "two", "three")
    await ledger.insert(first, second)
    await ledger.stores.erasures.erase_turn(second.turn_id)
    await ledger.insert(third)  # it was on its way
    found = await ledger.sweep.pending_turns(NOW, 10)
    assert [told.turn_id for _, told in found] == [first.turn_id]
