"""Sessions, and the messages their workflows receive: ids, never the text of a conversation.

Durable: open workflows and saved histories hold these records; later fields are optional.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from clawloop.contracts.turns import TurnOutcome
from clawloop.ids import FeedbackId, SessionId, TurnId


class SessionState(StrEnum):
    OPEN = "open"
    ENDING = "ending"  # the client said that its last turn was the last
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a session's workflow is begun with.

    Args:
        identified_by: what named the session (SessionSource).
        since: when the turn that is announced began.
        version: the adapter version that answered it.
    """

    session_id: SessionId
    policy: str
    identified_by: str
    since: datetime
    version: int


@dataclass(frozen=True, slots=True)
class TurnRecorded:
    """A message to a session's workflow: a main turn is in Postgres. Ids only, never text."""

    turn_id: TurnId
    version: int
    ends_session: bool = False


@dataclass(frozen=True, slots=True)
class FeedbackGiven:
    """A message to a session's workflow: somebody rated or commented on a turn."""

    feedback_id: FeedbackId
    turn_id: TurnId


@dataclass(frozen=True, slots=True)
class RejudgeRequested:
    """A message to a session's workflow: an operator wants a turn judged once more.

    Args:
        revision: of the judgement wanted; asked for twice, it is made once.
    """

    turn_id: TurnId
    revision: int


@dataclass(frozen=True, slots=True)
class ContentErased:
    """A message to a session's workflow: a person had content of it erased.

    Args:
        turns: the newest of its erased main turns, as many as fit a message.
        whole: all there was of the session, so that it ends unless a newer turn came.
    """

    turns: tuple[TurnId, ...]
    whole: bool = False


class TurnResult(BaseModel):
    """A turn's row in the table of its session's workflow.

    Args:
        number: position among the session's main turns, from 1; None if there is no such turn.
        outcome: None if there is no such turn.
        verdict: −1, 0, 1, or None if there is none.
        sample: the turn has a training sample.
        step: the newest training step that used the sample; None if none did.
        why: for people, without any text of the conversation.
    """

    model_config = ConfigDict(frozen=True)

    turn_id: TurnId
    number: int | None
    kind: str
    outcome: TurnOutcome | None
    verdict: int | None
    sample: bool
    step: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Erasure:
    """What an erasure did.

    Args:
        turns: how many lost their content now; 0 if all had before.
        expired: how many samples that waited for a step do not any more.
        learned: how many samples of what is gone steps have learned, or are learning. That stays in their versions.
        told: for the session's workflow; the same whenever the same is erased.
    """

    session: SessionFacts
    turns: int
    expired: int
    learned: int
    told: ContentErased


class FeedbackEffect(StrEnum):
    """What feedback does, as far as can be told when it is given."""

    AMENDS = "amends"  # the turn's judgement, which no step has used yet
    NEW_SAMPLE = "new_sample"  # a step has used the old one
    RECORDED = "recorded"  # the turn cannot be trained; it is kept and shown


@dataclass(frozen=True, slots=True)
class StoredFeedback:
    given: FeedbackGiven
    session: SessionFacts
    effect: FeedbackEffect
