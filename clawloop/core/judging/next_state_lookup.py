"""Finds a turn's next state among the turns that follow it.

A turn follows the main turn it continues; side turns between them do not count. What looks like a client's chore is no
feedback until a later request holds it with its reply: people ask for summaries, too.

A reply that calls tools is followed by their results. What a person says of it comes behind the answer they led to:
a recipe that learns from words waits for that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import TurnId
from clawloop.core.judging.evidence import words_of
from clawloop.core.judging.records import TurnContext
from clawloop.core.turns.next_state import NextState, chore_asked, goes_on, holds_exchange, is_doubtful, next_states

LoadContext: TypeAlias = Callable[[TurnId], Awaitable[TurnContext | None]]
"""A main turn's context; None for an unknown turn or a side turn."""


@dataclass(frozen=True, slots=True)
class FoundState:
    """
    Args:
        state: None if no request holds what follows the reply, or if that is withheld.
        withheld: something follows, and only looks like feedback so far.
    """

    state: NextState | None
    withheld: bool = False


async def find_next_state(load: LoadContext, turn: TurnContext, loaded: TurnContext | None = None) -> NextState | None:
    """The next state after a reply, from the first later main request that holds the reply; None if no request does.

    Of a turn that was judged by a recipe that learns from words: the first that has any, if one has.

    Args:
        loaded: a later turn whose context need not be loaded again.
    """
    found = (await look_for_next_state(load, turn, loaded)).state
    if turn.current is None or not turn.current.by_words:
        return found
    return await _said_behind_tools(load, found, loaded) or found


async def _said_behind_tools(
    load: LoadContext, found: NextState | None, loaded: TurnContext | None
) -> NextState | None:
    """What the user said first after tools had answered a reply; None if the user has said nothing yet, or at once."""
    state = found
    while state is not None and words_of(state.messages, ()) is None:
        later = await _load(load, state.next_turn_id, loaded)
        state = None if later is None else (await look_for_next_state(load, later, loaded)).state
    return None if state is None or state is found else replace(state, behind_tools=True)


async def look_for_next_state(load: LoadContext, turn: TurnContext, loaded: TurnContext | None = None) -> FoundState:
    """The next state as `find_next_state` has it, and whether a request that looks like a client's chore follows."""
    turn_id, own = turn.turn.record.turn_id, turn.turn.record.messages
    may_be_chore = chore_asked(own)
    withheld = False
    for later_id in turn.followed_by:
        later = await _load(load, later_id, loaded)
        if later is None:
            continue
        # `seed` starts the prefix digests of its key; `candidates` are older turns whose replies its request holds.
        asked = later.turn.record.messages
        messages = next_states(later.seed, asked, later.candidates, later.placed).get(turn_id)
        if messages is None:
            continue
        if may_be_chore and not holds_exchange(
            later.seed, asked, later.candidates, later.placed, own, turn_id, asks_more=False
        ):
            withheld = True  # a client's summary may stand for the conversation from now on
            continue
        if is_doubtful(asked, messages) and not await _is_held(load, later, loaded):
            withheld = True
            continue
        return FoundState(NextState(later_id, messages))
    return FoundState(None, withheld)


async def judgeable_by(
    load: LoadContext, recorded: TurnContext, before: TurnContext | None
) -> list[tuple[TurnContext, NextState]]:
    """The turns that a newly recorded turn makes judgeable, each with its next state.

    That is the turn it follows, if its request is the first to hold that turn's next state; and the turn before that
    one, if its next state was withheld until now. And itself, if it was stored after the turn that holds its own next
    state: that turn could not make it judgeable. And the turns that called the tools behind the answer that the user
    speaks of, where a recipe learns from words.

    Args:
        before: the turn it follows; None if there is none.
    """
    found: list[tuple[TurnContext, NextState]] = []
    turn_id = recorded.turn.record.turn_id
    if before is not None and before.turn.outcome is not TurnOutcome.ERASED:
        state = await find_next_state(load, before, recorded)
        if state is not None and state.next_turn_id == turn_id:
            found.append((before, state))
        if chore_asked(before.turn.record.messages) and not goes_on(recorded.turn.record.messages):
            chore = await _begin_of(load, before)
            withheld = None if chore is None or chore.follows is None else await load(chore.follows)
            if chore is not None and withheld is not None and withheld.turn.outcome is not TurnOutcome.ERASED:
                state = await find_next_state(load, withheld, recorded)
                if state is not None and state.next_turn_id == chore.turn.record.turn_id:
                    found.append((withheld, state))
    if not goes_on(recorded.turn.record.messages):
        async for calling in _learning_from_words(load, before):
            state = await find_next_state(load, calling, recorded)
            if state is not None and state.behind_tools and state.next_turn_id == turn_id:
                found.append((calling, state))
    if recorded.overtaken_by and recorded.turn.outcome is not TurnOutcome.ERASED:
        state = await find_next_state(load, recorded)
        if state is not None and state.next_turn_id in recorded.overtaken_by:
            found.append((recorded, state))
    return found


async def _is_held(load: LoadContext, chore: TurnContext, loaded: TurnContext | None) -> bool:
    """True if a later main request holds what a turn was asked last, with its reply, and asks for more."""
    asked, turn_id = chore.turn.record.messages, chore.turn.record.turn_id
    waiting = list(chore.followed_by)
    while waiting:
        later = await _load(load, waiting.pop(), loaded)
        if later is None:
            continue
        messages = later.turn.record.messages
        if holds_exchange(later.seed, messages, later.candidates, later.placed, asked, turn_id):
            return True
        if goes_on(messages):
            waiting += later.followed_by
    return False


async def _begin_of(load: LoadContext, turn: TurnContext) -> TurnContext | None:
    """The turn that was asked what this one goes on with; itself where no tools were called."""
    begin: TurnContext | None = turn
    while begin is not None and goes_on(begin.turn.record.messages):
        begin = None if begin.follows is None else await load(begin.follows)
    return begin


async def _learning_from_words(load: LoadContext, answer: TurnContext | None) -> AsyncIterator[TurnContext]:
    """The turns whose tool calls led to an answer, newest first, until one that was judged by what tools printed."""
    turn = answer
    while turn is not None and turn.follows is not None and goes_on(turn.turn.record.messages):
        turn = await load(turn.follows)
        if turn is not None and turn.current is not None:
            if not turn.current.by_words:
                return
            yield turn


async def _load(load: LoadContext, turn_id: TurnId, loaded: TurnContext | None) -> TurnContext | None:
    if loaded is not None and loaded.turn.record.turn_id == turn_id:
        return loaded
    return await load(turn_id)
