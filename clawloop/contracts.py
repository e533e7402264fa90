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
from clawloop.ids import ApiKeyId, FeedbackId, SessionId, TurnId

Message: TypeAlias = dict[str, JsonValue]
"""One chat message, exactly as the client or the engine sent it."""


class Scope(StrEnum):
    """What a key may do."""

    CHAT = "chat"  # /v1
    ADMIN = "admin"  # /admin/v1


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
    NO_FEEDBACK = "no_feedback"  # nothing later speaks about it
    NOT_TRAINABLE = "not_trainable"  # e.g. sampled with top_p < 1, or no reply
    UNJUDGED = "unjudged"  # no valid vote
    UNDECIDED = "undecided"  # verdict 0 and no hint
    SAMPLED = "sampled"  # waits for a step
    TRAINED = "trained"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"
    ROLLED_BACK = "rolled_back"
    ERASED = "erased"


class SampleState(StrEnum):
    """What became of a sample."""

    FRESH = "fresh"  # waits for a step
    CLAIMED = "claimed"  # in a step that is being computed
    TRAINED = "trained"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"
    SUPERSEDED = "superseded"  # feedback changed the judgement before a step took it


class SessionState(StrEnum):
    OPEN = "open"
    ENDING = "ending"  # the client said that its last turn was the last
    CLOSED = "closed"


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


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that was presented and found to be good."""

    id: ApiKeyId
    policy: str
    scopes: frozenset[Scope]


@dataclass(frozen=True, slots=True)
class Policy:
    """A base model plus a tree of adapter versions.

    Args:
        base_model: the name under which engines serve version 0.
        aliases: model names that mean this policy, beside `policy` and `policy-side`.
        active: the version new requests get.
        sampling: what fills the sampling fields a client leaves out.
    """

    id: str
    base_model: str
    aliases: tuple[str, ...]
    active: int
    sampling: dict[str, JsonValue]


@dataclass(frozen=True, slots=True)
class Engine:
    """One vLLM server.

    Args:
        versions: per policy, the adapter versions it has loaded; version 0 needs no loading.
        draining: takes no new requests.
        problem: why its agent says it lacks something or does not answer; None: it works, or has no agent. Requests
            go by `versions` and by each gateway's own look at its health, not by this.
    """

    id: str
    url: str
    versions: dict[str, frozenset[int]]
    draining: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Directory:
    """What the gateway routes by, read from Postgres about once a second and kept when that is away."""

    policies: tuple[Policy, ...]
    engines: tuple[Engine, ...]


@dataclass(frozen=True, slots=True)
class RouteKey:
    """What a request needs of an engine.

    Args:
        model: the name the engine serves it under.
        affinity: requests with the same value go to the same engine while it is healthy, for its prefix cache.
    """

    policy: str
    version: int
    model: str
    affinity: str
