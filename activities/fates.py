"""What steps have made of a session's turns since its workflow last heard of them: nobody else tells it.

Knows nothing about judging.
"""

from __future__ import annotations

from collections.abc import Sequence

from activities.messages import TurnFate
from activities.ports import TurnPlaces
from clawloop.contracts import Outcome, TurnKind
from clawloop.ids import SessionId
from clawloop.judging.records import TrainedTurn

# As many as the workflow's table has rows.
TRAINED_LIMIT = 20


async def with_trained(places: TurnPlaces, session: SessionId, fates: Sequence[TurnFate]) -> list[TurnFate]:
    """These fates and those of the session's newest trained turns; each turn once if `fates` has each once.

    Raises:
        StoreUnavailable
    """
    trained = {turn.turn_id: turn for turn in await places.trained(session, TRAINED_LIMIT)}
    told = [
        fate
        if (turn := trained.get(fate.turn_id)) is None
        else fate.model_copy(update={"outcome": _outcome(turn), "sample": True, "step": turn.step})
        for fate in fates
    ]
    known = {fate.turn_id for fate in fates}
    return [*told, *(_fate(turn) for turn in trained.values() if turn.turn_id not in known)]


def _fate(turn: TrainedTurn) -> TurnFate:
    return TurnFate(
        turn_id=turn.turn_id,
        number=turn.number,
        kind=TurnKind.MAIN,
        outcome=_outcome(turn),
        verdict=turn.verdict,
        sample=True,
        step=turn.step,
        why=turn.rolled_back or f"trained in step {turn.step}",
    )


def _outcome(turn: TrainedTurn) -> Outcome:
    return Outcome.TRAINED if turn.rolled_back is None else Outcome.ROLLED_BACK
