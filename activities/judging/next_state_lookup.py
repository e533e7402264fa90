"""Which turn is judged by what: a turn's next state, found among the turns that follow it.

Knows nothing about judges. A turn follows the main turn it continues; side turns between them do not count.
"""

from __future__ import annotations

from activities.judging.ports import TurnContextStore
from clawloop.contracts.turns import TurnOutcome
from clawloop.judging.records import TurnContext
from clawloop.turns.next_state import NextState, next_states


async def find_next_state(
    places: TurnContextStore, placed: TurnContext, known: TurnContext | None = None
) -> NextState | None:
    """What follows a turn's response in the first later main request that holds it; None: none does.

    Args:
        known: a later turn that was loaded already.
    """
    turn_id = placed.turn.record.turn_id
    for later_id in placed.followed_by:
        if known is not None and known.turn.record.turn_id == later_id:
            later: TurnContext | None = known
        else:
            later = await places.place(later_id)
        if later is None:
            continue
        states = next_states(later.seed, later.turn.record.messages, later.candidates)
        if (messages := states.get(turn_id)) is not None:
            return NextState(later_id, messages)
    return None


async def judgeable_by(places: TurnContextStore, told: TurnContext) -> list[tuple[TurnContext, NextState]]:
    """The turns for which this one is the moment to be judged, each with its next state.

    The turn it follows, if its request is the first that says something about that. And itself, if it was entered
    after the turn that says something about it: nobody else will look.
    """
    found: list[tuple[TurnContext, NextState]] = []
    turn_id = told.turn.record.turn_id
    before = None if told.follows is None else await places.place(told.follows)
    if before is not None and before.turn.outcome is not TurnOutcome.ERASED:
        state = await find_next_state(places, before, told)
        if state is not None and state.next_turn_id == turn_id:
            found.append((before, state))
    if told.overtaken_by and told.turn.outcome is not TurnOutcome.ERASED:
        state = await find_next_state(places, told)
        if state is not None and state.next_turn_id in told.overtaken_by:
            found.append((told, state))
    return found
