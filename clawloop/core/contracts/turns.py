"""Records of turns.

The spool holds them: new fields must be optional. Unknown values are None.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeAlias

from pydantic import JsonValue

from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.errors import EngineAnswerUnusable
from clawloop.core.ids import ApiKeyId, EpisodeId, SessionId, TurnId

Message: TypeAlias = dict[str, JsonValue]
"""One chat message, exactly as the client or the engine sent it."""


class TurnKind(StrEnum):
    MAIN = "main"  # may be trained
    SIDE = "side"  # relayed and recorded, never trained
    PRACTICE = "practice"  # a main turn's request answered again without lessons: trained, and nobody gets the reply


class TurnStatus(StrEnum):
    """A reply's ending."""

    COMPLETE = "complete"  # the engine ended it
    LENGTH = "length"  # cut by a token limit
    ABORTED = "aborted"  # the client went away
    ERROR = "error"  # the engine failed


CALLS_TOOLS = "tool_calls"
"""The `finish_reason` of a reply that goes on once its tools have answered."""


class TurnOutcome(StrEnum):
    """The outcome of a turn; `outcome_detail` has the reason."""

    WAITING = "waiting"  # waits for its next state or its judge
    SIDE = "side"  # a side turn
    NO_FEEDBACK = "no_feedback"  # no later message is about it
    NOT_TRAINABLE = "not_trainable"  # e.g. sampled with top_p < 1, or no reply
    UNJUDGED = "unjudged"  # no valid vote
    UNDECIDED = "undecided"  # verdict 0 and no hint
    SAMPLED = "sampled"  # waits for a step
    HELD_OUT = "held_out"  # judged and never trained: versions are compared on it
    TRAINED = "trained"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"
    ROLLED_BACK = "rolled_back"
    ERASED = "erased"


class MatchedBy(StrEnum):
    """The rule that found the turn that a request follows."""

    CONTEXT = "context"  # the conversation up to and including its reply is equal
    PLACE = "place"  # its reply stands, in the client's words, right after what it alone was asked
    REPLY = "reply"  # its reply is there, after other messages


class SessionSource(StrEnum):
    """The part of a request that identified its session."""

    HEADER = "x-session-id"
    AFFINITY = "x-session-affinity"
    THREAD = "thread-id"
    CODEX_SESSION = "session-id"
    CLAUDE_CODE = "x-claude-code-session-id"
    CACHE_KEY = "prompt_cache_key"
    BODY = "session_id"
    METADATA = "metadata.session_id"
    OPENCLAW = "openclaw sessionId"
    CONVERSATION = "conversation"  # no name: its messages identify it


@dataclass(frozen=True, slots=True)
class SessionEvidence:
    """The evidence in a request that identifies its session.

    Args:
        source: the part of the request that has it.
        value: the client's own value; None exactly when `source` is CONVERSATION.
        narrowing: values that name no session but keep equal conversations apart (`user`, …).
        policy: the policy that a header chose; None: the key's own. Policies share no session.
    """

    source: SessionSource
    value: str | None
    narrowing: tuple[str, ...] = ()
    policy: str | None = None


@dataclass(frozen=True, slots=True)
class KindDecision:
    kind: TurnKind
    reason: str  # shown to people, e.g. "header X-Turn-Type: side"


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A finished turn as the gateway recorded it.

    Session and parent are found when it is inserted, so that it can wait in the spool.

    Args:
        turn_id: also in the `id` of the client's completion.
        group_id: the first turn of an `n > 1` request; None for n = 1.
        choice: index of this choice in its request.
        alias: the model name the client asked for.
        version: the adapter version that answered; 0 is the base model.
        engine_id: None if no engine took the request.
        messages: the request's messages, unchanged.
        tools: the request's tools, unchanged.
        response: the assistant message as relayed; None if there was none.
        prompt_ids, response_ids: as the engine returned them; None if it did not.
        logprobs: of `response_ids`, under the recorded sampling; None if unknown.
        sampling: every sampling field sent to the engine, with defaults; `asked`: those that an episode's client asked
            for and that were not sent; `instructions_length`: characters of the first message that are `instructions`;
            `tool_origins`: kind, name and namespace of the client's tools that are no plain functions, by the function.
        finish_reason: the engine's; None if the reply did not end.
        error: why status is ERROR, or why the tokens are unknown.
        ends_session: the client ends the session with this turn.
        episode_id: the episode whose key made the request: its rollout group decides what becomes of the turn, no
            session workflow does.
        lessons: those that the prompt held beside the messages, in their order.
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
    episode_id: EpisodeId | None = None
    lessons: tuple[ShownLesson, ...] = ()

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
    """The result of inserting a turn.

    Args:
        duplicate: the turn was stored before; nothing was written.
        opens_session: its session began with it: no turn was stored that it could make judgeable.
        erased: its session, or a turn it repeats or continues, was erased after it began: stored without its content.
    """

    turn_id: TurnId
    session_id: SessionId
    parent_turn_id: TurnId | None
    duplicate: bool
    erased: bool = False
    opens_session: bool = False


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A stored turn: its record, session, parent and outcome.

    Args:
        record: exactly as it was inserted.
        outcome_detail: reason of the outcome; None without one.
        announced_at: when its session's workflow was notified; None if it was not.
        matched_by: how the parent was found; None without one.
    """

    record: TurnRecord
    session_id: SessionId
    parent_turn_id: TurnId | None
    outcome: TurnOutcome
    outcome_detail: str | None
    announced_at: datetime | None
    matched_by: MatchedBy | None = None
