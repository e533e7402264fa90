"""What workflows and activities say to each other: ids, scores and reasons, never text.

Knows nothing about who does the work. Durable: open workflows and saved histories hold these; later fields are
optional.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import FeedbackId, SessionId, TurnId

WHY_LIMIT = 200  # characters of a reason that cross Temporal; Postgres holds the whole


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class JudgeTurn(_Message):
    """Judge what a turn makes judgeable: the turn it follows, or itself when it came late.

    Args:
        turn_id: the turn that was announced, or that feedback speaks about.
        feedback_id: judge `turn_id` itself, anew, because of this feedback.
        itself: judge `turn_id` itself, by what follows it.
        give_up: ask no judge any more: what is missing stays missing, for this reason.
        revision: judge `turn_id` itself, as this revision, because an operator asked for it.
    """

    session_id: SessionId
    turn_id: TurnId
    feedback_id: FeedbackId | None = None
    itself: bool = False
    give_up: str | None = None
    revision: int | None = None


class AskDirectly(_Message):
    """Ask one direct vote on a turn that was judged, and keep it; nothing is decided by it here."""

    session_id: SessionId
    turn_id: TurnId


class TurnResult(_Message):
    """What became of a turn, for the workflow's table.

    Args:
        number: its place among the session's main turns, from 1; None if there is no such turn.
        outcome: None if there is no such turn.
        verdict: −1, 0, 1, or None if there is none.
        sample: it has a training sample.
        step: the step it was trained in; None if it was not.
        why: for people, without any text of the conversation.
    """

    turn_id: TurnId
    number: int | None
    kind: str
    outcome: TurnOutcome | None
    verdict: int | None
    sample: bool
    step: int | None
    why: str


class Judged(_Message):
    """What became of the turns that could be judged, and of those of the session that steps have learned from."""

    fates: list[TurnResult]


class CloseSession(_Message):
    """
    Args:
        why: what closes it, e.g. `idle for 30 min`.
        up_to: the newest turn the workflow was told of; newer ones are not its to decide. None: no limit.
        give_up: turns that could be judged and were not are unjudged now.
        asked_directly: direct votes were asked for; those there are decide.
        tried_up_to: turns that could be judged were tried up to this one: newer ones are said first.
        again: it was looked into after it was closed, e.g. for feedback: one that is open stays so.
    """

    session_id: SessionId
    why: str
    up_to: TurnId | None = None
    give_up: bool = False
    asked_directly: bool = False
    again: bool = False
    tried_up_to: TurnId | None = None


class Closed(_Message):
    """
    Args:
        to_judge: turns that have a next state and were never judged; the session is not closed before they are.
        to_ask: turns whose votes cancel out, for a direct vote each; the session is not closed before that.
        fates: of the turns the closing decided, and of those that steps have learned from.
        guarantee: what the at-least-one rule did, or why nothing; empty if it is not the first close.
        still_open: it was to be closed again, but it is open: nothing was done.
    """

    to_judge: list[TurnId]
    fates: list[TurnResult]
    guarantee: str = ""
    turns: int = 0
    to_ask: list[TurnId] = []
    still_open: bool = False


class Swept(_Message):
    """How much a sweep found.

    Args:
        announced: turns whose workflows were told.
        feedback: pieces of feedback whose workflows were told.
        woken: sessions that nobody had closed.
        work: policies whose training workflows were told that a batch waits.
        removed: versions whose files nobody needed.
        engines: engines' workflows that were begun, or ended since their engine was removed.
        stuck: sessions whose workflow could not be told; the next sweep tries again.
    """

    announced: int
    feedback: int
    woken: int
    work: int = 0
    removed: int = 0
    engines: int = 0
    stuck: int = 0
