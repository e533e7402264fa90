"""The records our parts hand to each other.

Knows nothing about HTTP, Postgres or Temporal. Durable: a field once written stays readable; later fields are
optional. Lengths that disagree raise; what is not known is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

from pydantic import JsonValue

from clawloop.errors import EngineAnswerUnusable
from clawloop.ids import ApiKeyId, SessionId, TurnId

Message: TypeAlias = dict[str, JsonValue]
"""One chat message, exactly as the client or the engine sent it."""


class TurnKind(StrEnum):
    MAIN = "main"  # may be trained
    SIDE = "side"  # relayed and recorded, never trained


class TurnStatus(StrEnum):
    """How a reply ended."""

    COMPLETE = "complete"  # the engine ended it
    LENGTH = "length"  # cut by a token limit
    ABORTED = "aborted"  # the client went away
    ERROR = "error"  # the engine failed


class TurnOutcome(StrEnum):
    """What became of a turn. `outcome_detail` says why."""

    WAITING = "waiting"  # for its next state or its judge
    SIDE = "side"  # a side turn
    NO_FEEDBACK = "no_feedback"  # no later message is about it
    NOT_TRAINABLE = "not_trainable"  # e.g. sampled with top_p < 1, or no reply
    UNJUDGED = "unjudged"  # no valid vote
    UNDECIDED = "undecided"  # verdict 0 and no hint
    SAMPLED = "sampled"  # waits for a step
    TRAINED = "trained"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"
    ROLLED_BACK = "rolled_back"
    ERASED = "erased"


class SessionSource(StrEnum):
    """What identified a session, in the order in which they are looked at (DESIGN section 6)."""

    HEADER = "x-session-id"
    AFFINITY = "x-session-affinity"
    CACHE_KEY = "prompt_cache_key"
    BODY = "session_id"
    METADATA = "metadata.session_id"
    OPENCLAW = "openclaw sessionId"
    CONVERSATION = "conversation"  # nothing named it: its messages do


@dataclass(frozen=True, slots=True)
class SessionEvidence:
    """What a request says about the session it belongs to.

    Args:
        source: where it was said.
        value: the client's own value; None exactly when `source` is CONVERSATION.
        narrowing: values that never name a session but keep equal conversations apart (`user`, …).
    """

    source: SessionSource
    value: str | None
    narrowing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KindDecision:
    kind: TurnKind
    reason: str  # shown to people, e.g. "header X-Turn-Type: side"


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One finished turn as the gateway saw it, before it has a place among other turns.

    Self-contained: what it lacks (session, parent) is found when it is entered, so it can wait in the spool.

    Args:
        turn_id: ours; also the `id` of the client's completion.
        group_id: the first turn of an `n > 1` request; None for n = 1.
        choice: index of this choice in its request.
        alias: the model name the client asked for.
        version: the adapter version that answered; 0 is the base model.
        engine_id: None if no engine took the request.
        messages: the request's messages, untouched.
        tools: the request's tools, untouched.
        response: the assistant message as relayed; None if there was none.
        prompt_ids, response_ids: the engine's own; None if it did not say.
        logprobs: of `response_ids`, under the recorded sampling; None if unknown.
        sampling: every sampling field the engine was given, defaults filled in.
        finish_reason: the engine's own word; None if the reply did not end.
        error: why status is ERROR, or why the tokens are unknown.
        ends_session: the client said that the session ends with this turn.
    """

    turn_id: TurnId
    group_id: TurnId | None
    choice: int
    api_key_id: ApiKeyId
    policy: str
    alias: str
    evidence: SessionEvidence
    kind: TurnKind
    kind_reason: str
    status: TurnStatus
    error: str | None
    version: int
    engine_id: str | None
    messages: list[Message]
    tools: list[JsonValue] | None
    response: Message | None
    prompt_ids: list[int] | None
    response_ids: list[int] | None
    logprobs: list[float] | None
    sampling: dict[str, JsonValue]
    finish_reason: str | None
    ends_session: bool
    started_at: datetime
    finished_at: datetime

    def __post_init__(self) -> None:
        if self.logprobs is not None:
            ids = self.response_ids
            if ids is None or len(ids) != len(self.logprobs):
                raise EngineAnswerUnusable(
                    f"turn {self.turn_id}: {len(self.logprobs)} log-probs for "
                    f"{'unknown' if ids is None else len(ids)} response ids"
                )


@dataclass(frozen=True, slots=True)
class InsertedTurn:
    """Where a turn record found its place.

    Args:
        duplicate: it had been entered before; nothing was written.
        erased: its session was erased after it began, so that it was entered without its content.
    """

    turn_id: TurnId
    session_id: SessionId
    parent_turn_id: TurnId | None
    duplicate: bool
    erased: bool = False


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn as it stands among the others: what was recorded, and what became of it.

    Args:
        record: exactly as it was entered, rebuilt.
        outcome_detail: why; None while there is nothing to say.
        announced_at: when its session's workflow was told; None if it was not.
    """

    record: TurnRecord
    session_id: SessionId
    parent_turn_id: TurnId | None
    outcome: TurnOutcome
    outcome_detail: str | None
    announced_at: datetime | None
