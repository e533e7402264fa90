"""What steps have made of a session's turns since its workflow last heard of them: nobody else tells it.

Knows nothing about judging.
"""

from __future__ import annotations

from collections.abc import Sequence

from activities.judging.messages import TurnResult
from activities.judging.ports import TurnContextStore
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import SessionId
from clawloop.judging.records import TrainedTurn

# As many as the workflow's table has rows.
TRAINED_LIMIT = 20


async def with_trained_turns(
    places: TurnContextStore, session: SessionId, fates: Sequence[TurnResult]
) -> list[TurnResult]:
    """These fates and those of the session's newest trained turns; each turn once if `fates` has each once.

    Raises:
        StoreUnavailable
    """
    trained = {turn.turn_id: turn for turn in await places.trained(session, TRAINED_LIMIT)}
    told = [
        result
        if (turn := trained.get(result.turn_id)) is None
        else result.model_copy(update={"outcome": _outcome(turn), "sample": True, "step": turn.step})
        for result in fates
    ]
    known = {result.turn_id for result in fates}
    return [*told, *(_turn_result(turn) for turn in trained.values() if turn.turn_id not in known)]


def _turn_result(turn: TrainedTurn) -> TurnResult:
    return TurnResult(
        turn_id=turn.turn_id,
        number=turn.number,
        kind=TurnKind.MAIN,
        outcome=_outcome(turn),
        verdict=turn.verdict,
        sample=True,
        step=turn.step,
        why=turn.rolled_back or f"trained in step {turn.step}",
    )


def _outcome(turn: TrainedTurn) -> TurnOutcome:
    return TurnOutcome.TRAINED if turn.rolled_back is None else TurnOutcome.ROLLED_BACK
