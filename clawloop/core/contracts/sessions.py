"""Records of sessions, and the messages to their workflows: ids, never text of a conversation.

Open workflows and saved histories hold these records: new fields must be optional.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from clawloop.core.contracts.turns import TurnOutcome
from clawloop.core.ids import ApiKeyId, FeedbackId, SessionId, TurnId


class SessionState(StrEnum):
    OPEN = "open"
    ENDING = "ending"  # the client ended the session with its last turn
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The input of a session's workflow.

    Args:
        identified_by: SessionSource of its first turn.
        since: when the notified turn, or the session, began.
        version: the adapter version that answered the turn.
    """

    session_id: SessionId
    policy: str
    identified_by: str
    since: datetime
    version: int


@dataclass(frozen=True, slots=True)
class TurnRecorded:
    """Notifies a session's workflow of a stored main turn.

    Args:
        opens_session: the session began with this turn, so it makes no earlier turn judgeable. False if unknown.
    """

    turn_id: TurnId
    version: int
    ends_session: bool = False
    opens_session: bool = False


@dataclass(frozen=True, slots=True)
class FeedbackGiven:
    """Notifies a session's workflow of a rating of, or comment on, a turn."""

    feedback_id: FeedbackId
    turn_id: TurnId


@dataclass(frozen=True, slots=True)
class RejudgeRequested:
    """Asks a session's workflow to judge a turn once more, for an operator.

    Args:
        revision: of the requested judgement, which makes the request idempotent.
    """

    turn_id: TurnId
    revision: int


@dataclass(frozen=True, slots=True)
class ContentErased:
    """Notifies a session's workflow of an erasure.

    Args:
        turns: the newest erased main turns of the session, as many as fit a message.
        whole: all of the session was erased, so that the workflow ends unless there is a newer turn.
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
    """The result of an erasure.

    Args:
        turns: how many turns lost their content; 0 if all had been erased before. Practice turns go with the requests
            that they repeat, and are not counted.
        expired: how many waiting samples expired.
        learned: how many samples of erased turns are trained or being trained; those steps' versions keep what they
            learned.
        message: for the session's workflow; the same for every repetition.
    """

    session: SessionFacts
    turns: int
    expired: int
    learned: int
    message: ContentErased


class FeedbackEffect(StrEnum):
    """The effect of feedback, as far as it is known when the feedback is stored."""

    AMENDS = "amends"  # changes the turn's judgement, which no step has used yet
    NEW_SAMPLE = "new_sample"  # makes another sample, as a step has used the old one
    RECORDED = "recorded"  # is stored only, as the turn cannot be trained

    def told(self, *, of_session: bool = False) -> str:
        """One line for whoever gave the feedback, on a reply or on a whole session."""
        return f"Saved; {_OF_SESSION[self] if of_session else _OF_REPLY[self]}."


_OF_REPLY = {
    FeedbackEffect.AMENDS: "it changes this reply's verdict before training",
    FeedbackEffect.NEW_SAMPLE: "it makes a new sample of this reply, since a step used the old one",
    FeedbackEffect.RECORDED: "nothing is learned from it",
}
_OF_SESSION = _OF_REPLY | {FeedbackEffect.AMENDS: "it changes the session's rewards before training"}


@dataclass(frozen=True, slots=True)
class StoredFeedback:
    given: FeedbackGiven
    session: SessionFacts
    effect: FeedbackEffect


@dataclass(frozen=True, slots=True)
class RepeatableRequest:
    """A request whose client may send it again, with the same Idempotency-Key.

    Args:
        key_sha256: of the Idempotency-Key.
        body_sha256: of the Idempotency-Key and the body.
    """

    key_sha256: bytes
    body_sha256: bytes


@dataclass(frozen=True, slots=True)
class FeedbackAnswer:
    """The stored answer to a repeatable feedback request.

    Args:
        body_sha256: of the request's body.
        feedback_id: None for the outcome of a session's task.
    """

    body_sha256: bytes
    feedback_id: FeedbackId | None
    effect: FeedbackEffect


@dataclass(frozen=True, slots=True)
class WaitingWork:
    """Work that waits for a session's workflow: how many sessions, their turns, and pieces of feedback."""

    sessions: int
    turns: int
    feedback: int


@dataclass(frozen=True, slots=True)
class ToldTurns:
    """Turns that a run of a session's workflow was told of, each after it was stored; of the runs before the newest."""

    session: SessionId
    turns: frozenset[TurnId]


@dataclass(frozen=True, slots=True)
class KeyOfTurns:
    """A key whose turns wait on the disk, and its policy."""

    key: ApiKeyId
    policy: str
