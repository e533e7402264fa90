"""Inputs and results of the judging activities, and rows of a session workflow's table: ids, scores and reasons."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from clawloop.core.contracts.notices import Message
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.ids import FeedbackId, SessionId, TurnId

# Messages -------------------------------------------------------------------------------------------------------------
# Inputs and results of the judging activities: ids, scores and reasons, never text.
#
# Durable: open workflows and saved histories hold these; later fields are optional.

WHY_LIMIT = 200  # characters of a reason that cross Temporal; Postgres holds the whole


class JudgeTurn(Message):
    """Judge the turn that `turn_id` follows, and `turn_id` itself if it was stored late.

    Args:
        turn_id: the turn that was recorded, or that was given feedback.
        feedback_id: judge `turn_id` itself, because of this feedback.
        itself: judge `turn_id` itself, by what follows it.
        give_up: ask no judge: missing answers stay missing, for this reason.
        revision: judge `turn_id` itself, as this revision, because an operator asked for it.
    """

    session_id: SessionId
    turn_id: TurnId
    feedback_id: FeedbackId | None = None
    itself: bool = False
    give_up: str | None = None
    revision: int | None = None


class JudgeTurns(Message):
    """Judge several turns of a session, each as `JudgeTurn` says, in one activity.

    Args:
        turn_ids: at least one.
        itself: judge each turn itself, by what follows it.
        give_up: ask no judge: missing answers stay missing, for this reason.
    """

    session_id: SessionId
    turn_ids: list[TurnId]
    itself: bool = False
    give_up: str | None = None

    def single(self) -> list[JudgeTurn]:
        """One request for each turn."""
        return [
            JudgeTurn(session_id=self.session_id, turn_id=turn_id, itself=self.itself, give_up=self.give_up)
            for turn_id in self.turn_ids
        ]


class CollectDirectVote(Message):
    """Ask for one direct vote on a judged turn and store it; the session's closing decides by it."""

    session_id: SessionId
    turn_id: TurnId


class Judged(Message):
    """
    Args:
        results: of the turns that could be judged, and of the session's newest trained turns.
    """

    results: list[TurnResult]


class CloseSession(Message):
    """
    Args:
        why: what closes the session, e.g. `idle for 30 min`.
        up_to: the newest turn the workflow knows; newer turns are left alone. None: no limit.
        give_up: turns that could be judged and were not become unjudged.
        asked_directly: direct votes were asked for; decide by those that are stored.
        tried_up_to: judging was tried for turns up to this one; newer ones are listed first.
        again: the session was closed before, and something came since, e.g. feedback. If it is open, do nothing.
    """

    session_id: SessionId
    why: str
    up_to: TurnId | None = None
    give_up: bool = False
    asked_directly: bool = False
    again: bool = False
    tried_up_to: TurnId | None = None


class Closed(Message):
    """The result of one closing step: the session is closed, or something must be done first.

    Args:
        to_judge: turns that have a next state and were never judged: judge them, then close.
        to_ask: turns whose votes cancel out: ask for a direct vote on each, then close.
        results: of the turns that the closing decided, and of the session's newest trained turns.
        guarantee: what the at-least-one rule gave; empty if this is not the first close.
        still_open: the session was to be closed again, but it is open: nothing was done.
    """

    to_judge: list[TurnId]
    results: list[TurnResult]
    guarantee: str = ""
    turns: int = 0
    to_ask: list[TurnId] = Field(default_factory=list)
    still_open: bool = False


# Rows -----------------------------------------------------------------------------------------------------------------
# Rows of a session workflow's table.

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
