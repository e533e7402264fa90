"""Rows of a session workflow's table."""

from __future__ import annotations

from collections.abc import Sequence

from activities.judging.messages import WHY_LIMIT
from clawloop.contracts.sessions import TurnResult
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import TurnId

# As many as the workflow's table has rows.
TRAINED_LIMIT = 20


def main_turn_result(turn_id: TurnId, number: int, outcome: TurnOutcome, verdict: int | None, why: str) -> TurnResult:
    """The row of a main turn; its step is filled in by `with_trained_turns`."""
    return TurnResult(
        turn_id=turn_id,
        number=number,
        kind=TurnKind.MAIN,
        outcome=outcome,
        verdict=verdict,
        sample=outcome in (TurnOutcome.SAMPLED, TurnOutcome.TRAINED),
        step=None,
        why=why[:WHY_LIMIT],
    )


def unknown_turn_result(turn_id: TurnId) -> TurnResult:
    """The row of a turn that is not stored, or is no main turn."""
    return TurnResult(
        turn_id=turn_id,
        number=None,
        kind="unknown",
        outcome=None,
        verdict=None,
        sample=False,
        step=None,
        why="no main turn of this id is stored",
    )


def with_trained_turns(results: Sequence[TurnResult], trained_turns: Sequence[TurnResult]) -> list[TurnResult]:
    """`results` and the session's newest trained turns, each turn once if `results` has each once.

    Nothing notifies a session's workflow of training steps: it learns of them with the next judgement or closing.
    """
    trained = {result.turn_id: result for result in trained_turns}
    updated = [
        result
        if (newest := trained.pop(result.turn_id, None)) is None
        else result.model_copy(update={"outcome": newest.outcome, "sample": True, "step": newest.step})
        for result in results
    ]
    return [*updated, *trained.values()]
