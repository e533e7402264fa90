"""Inputs and results of the judging activities: ids, scores and reasons, never text.

Durable: open workflows and saved histories hold these; later fields are optional.
"""

from __future__ import annotations

from pydantic import Field

from clawloop.contracts.message import Message
from clawloop.contracts.sessions import TurnResult
from clawloop.ids import FeedbackId, SessionId, TurnId

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
