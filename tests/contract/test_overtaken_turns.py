"""Turns that were stored or signalled after the turn that follows them, and are judged by it all the same."""

from __future__ import annotations

from clawloop.core.ids import TurnId
from tests.contract.ledgers import Ledger, postgres_ledger

__all__ = ["postgres_ledger"]


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
    await ledger.stores.turns.mark_notified([third.turn_id])
    assert await overtaken_by() == {third.turn_id}
    await ledger.stores.turns.mark_notified([second.turn_id])
    assert await overtaken_by() == {third.turn_id}


async def test_a_turn_is_not_overtaken_by_one_that_is_signalled_with_it_or_later(postgres_ledger: Ledger) -> None:
    ledger = postgres_ledger
    first, second, third = ledger.talk("one", "two", "three")
    await ledger.insert(first, second, third)
    await ledger.stores.turns.mark_notified([second.turn_id])
    await ledger.stores.turns.mark_notified([third.turn_id])
    context = await ledger.judgements.load_context(second.turn_id)
    assert context is not None
    assert context.overtaken_by == frozenset()
