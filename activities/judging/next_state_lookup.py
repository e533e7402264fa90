"""Finds a turn's next state among the turns that follow it.

A turn follows the main turn it continues; side turns between them do not count.
"""

from __future__ import annotations

from activities.judging.ports import TurnContextStore
from clawloop.contracts.turns import TurnOutcome
from clawloop.judging.records import TurnContext
from clawloop.turns.next_state import NextState, next_states


async def find_next_state(
    contexts: TurnContextStore, turn: TurnContext, loaded: TurnContext | None = None
) -> NextState | None:
    """What follows a turn's reply in the first later main request that holds it; None if no request does.

    Args:
        loaded: a later turn whose context need not be loaded again.
    """
    turn_id = turn.turn.record.turn_id
    for later_id in turn.followed_by:
        if loaded is not None and loaded.turn.record.turn_id == later_id:
            later: TurnContext | None = loaded
        else:
            later = await contexts.load_context(later_id)
        if later is None:
            continue
        # `seed` starts the prefix digests of its key; `candidates` are older turns whose replies its request holds.
        states = next_states(later.seed, later.turn.record.messages, later.candidates)
        if (messages := states.get(turn_id)) is not None:
            return NextState(later_id, messages)
    return None


async def judgeable_by(
    contexts: TurnContextStore, recorded: TurnContext, before: TurnContext | None
) -> list[tuple[TurnContext, NextState]]:
    """The turns that a newly recorded turn makes judgeable, each with its next state.

    That is the turn it follows, if its request is the first to hold that turn's next state. And itself, if it was
    stored after the turn that holds its own next state: that turn could not make it judgeable.

    Args:
        before: the turn it follows; None if there is none.
    """
    found: list[tuple[TurnContext, NextState]] = []
    turn_id = recorded.turn.record.turn_id
    if before is not None and before.turn.outcome is not TurnOutcome.ERASED:
        state = await find_next_state(contexts, before, recorded)
        if state is not None and state.next_turn_id == turn_id:
            found.append((before, state))
    if recorded.overtaken_by and recorded.turn.outcome is not TurnOutcome.ERASED:
        state = await find_next_state(contexts, recorded)
        if state is not None and state.next_turn_id in recorded.overtaken_by:
            found.append((recorded, state))
    return found
