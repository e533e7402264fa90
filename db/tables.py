"""The tables. What every column means, and nothing about how it is filled.

Columns of later slices come with their own migrations. Ids are UUIDs made by us (clawloop.ids); text that names
one of a closed set is one of the enums in `clawloop.contracts`.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import (
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    UniqueConstraint,
    text,
)
from sqlalchemy import text as sql  # where a column is called text
from sqlalchemy.orm import Mapped, mapped_column

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome, TurnStatus
from db.declarative import Base as Base
from db.declarative import one_of
from db.exact_json import ExactJson
from db.step_tables import Event as Event
from db.step_tables import Step as Step
from db.step_tables import StepSample as StepSample


class PrefixRole(StrEnum):
    """What of a conversation a stored hash stands for."""

    REQUEST = "request"  # all messages of the turn's request
    REPLY = "reply"  # those and the turn's reply
    EXPECTED = "expected"  # up to a reply the turn's request holds, of a turn nobody has entered (yet)


class Policy(Base):
    """A base model plus a tree of adapter versions."""

    __tablename__ = "policies"

    id: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str]  # the name under which engines serve version 0
    aliases: Mapped[list[str]]
    sampling: Mapped[Any] = mapped_column(ExactJson)  # fills the fields a client leaves out
    head: Mapped[int]  # newest committed version
    active: Mapped[int]  # the version new requests get
    epoch: Mapped[int] = mapped_column(server_default=text("0"))  # raised by every roll-back
    pinned: Mapped[int | None]  # stays active whatever is trained
    pool: Mapped[str] = mapped_column(server_default=text("'default'"))  # the trainers that train it
    paused_reason: Mapped[str | None]
    paused_at: Mapped[datetime | None]
    work_waiting: Mapped[bool] = mapped_column(server_default=text("false"))
    work_signalled_at: Mapped[datetime | None]  # its training workflow was told that work waits
    recipe_hash: Mapped[str | None] = mapped_column(ForeignKey("recipes.hash"))  # what it learns by; None: nothing
    verdict_count: Mapped[int] = mapped_column(server_default=text("0"))  # verdicts of +1 and -1 so far
    verdict_total: Mapped[int] = mapped_column(server_default=text("0"))  # their sum
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))


class Version(Base):
    """What a step produced; version 0 is the base model itself."""

    __tablename__ = "versions"
    __table_args__ = (
        ForeignKeyConstraint(["policy", "parent"], ["versions.policy", "versions.n"]),
        CheckConstraint("(n = 0) = (parent IS NULL) AND (n = 0) = (path IS NULL)", name="base"),
    )

    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[int | None]
    path: Mapped[str | None]
    sha256: Mapped[bytes | None]
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    activated_at: Mapped[datetime | None]  # it answered from then on
    retired_at: Mapped[datetime | None]  # until then
    removed_at: Mapped[datetime | None]  # its files are gone


class ApiKey(Base):
    """A key's secret is not here: only what recognises it."""

    __tablename__ = "api_keys"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    name: Mapped[str]
    prefix: Mapped[str] = mapped_column(unique=True)  # the public part
    secret_sha256: Mapped[bytes]
    scopes: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    revoked_at: Mapped[datetime | None]


class Session(Base):
    """One conversation with one key."""

    __tablename__ = "sessions"
    __table_args__ = (
        one_of("state", SessionState),
        CheckConstraint("task_outcome IN (-1, 1)", name="task_outcome"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    api_key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"))
    external_id: Mapped[str | None]  # the client's own value
    identified_by: Mapped[str]  # SessionSource of the turn that began it
    state: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    last_turn_at: Mapped[datetime]
    first_closed_at: Mapped[datetime | None]  # the at-least-one rule was applied then
    closed_at: Mapped[datetime | None]  # the last time
    closed_why: Mapped[str | None]
    guarantee: Mapped[str | None]  # what the at-least-one rule did, or why nothing
    task_outcome: Mapped[int | None]  # whether its task succeeded, 1 or -1; None: nobody said
    erased_at: Mapped[datetime | None]  # what began before then has no content any more


class ToolList(Base):
    """The tools of requests, each list once."""

    __tablename__ = "tool_lists"

    sha256: Mapped[bytes] = mapped_column(primary_key=True)  # of the JSON text
    tools: Mapped[Any] = mapped_column(ExactJson)


class Turn(Base):
    """One request and its response.

    The request's messages are the first `messages_kept` of the parent's conversation (its messages and its
    response), then `messages_added`. Its prompt ids are the first `prompt_shared` of the parent's tokens (prompt
    and response), then `prompt_ids`. Without a parent both counts are 0.
    """

    __tablename__ = "turns"
    __table_args__ = (
        one_of("kind", TurnKind),
        one_of("status", TurnStatus),
        one_of("outcome", TurnOutcome),
        CheckConstraint("parent_turn_id < id", name="parent_is_older"),  # so chains end
        CheckConstraint("parent_turn_id IS NOT NULL OR messages_kept = 0", name="kept_of_parent"),
        CheckConstraint("parent_turn_id IS NOT NULL OR prompt_shared = 0", name="shared_with_parent"),
        CheckConstraint("(prompt_shared IS NULL) = (prompt_ids IS NULL)", name="prompt_known"),
        CheckConstraint(
            "octet_length(prompt_ids) % 4 = 0 AND octet_length(response_ids) % 4 = 0", name="ids_are_whole"
        ),
        CheckConstraint(
            "logprobs IS NULL OR (response_ids IS NOT NULL AND octet_length(logprobs)"
            " IN (octet_length(response_ids), 2 * octet_length(response_ids)))",
            name="logprob_per_id",
        ),
        Index(None, "session_id", "id"),
        Index(None, "session_id", "response_digest"),
        Index(None, "parent_turn_id"),
        Index("turns_waiting_idx", "session_id", postgresql_where=text("outcome = 'waiting'")),
        Index("turns_group_idx", "group_id", postgresql_where=text("group_id IS NOT NULL")),
        Index("turns_tools_idx", "tools_sha256", postgresql_where=text("tools_sha256 IS NOT NULL")),
        Index("turns_unannounced_idx", "id", postgresql_where=text("announced_at IS NULL AND kind = 'main'")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    session_id: Mapped[UUID] = mapped_column(ForeignKey("sessions.id"))
    parent_turn_id: Mapped[UUID | None] = mapped_column(ForeignKey("turns.id"))
    group_id: Mapped[UUID | None]  # first turn of an n > 1 request
    choice: Mapped[int]
    kind: Mapped[str]
    kind_reason: Mapped[str]
    status: Mapped[str]
    error: Mapped[str | None]  # why the status is error
    outcome: Mapped[str]
    outcome_detail: Mapped[str | None]
    alias: Mapped[str]  # the model name the client asked for
    version: Mapped[int]
    engine_id: Mapped[str | None]
    evidence: Mapped[Any] = mapped_column(ExactJson)  # SessionEvidence
    messages_kept: Mapped[int]
    messages_added: Mapped[Any] = mapped_column(ExactJson)
    tools_sha256: Mapped[bytes | None] = mapped_column(ForeignKey("tool_lists.sha256"))
    response: Mapped[Any | None] = mapped_column(ExactJson)
    response_digest: Mapped[bytes | None]  # of the reply alone, normalised: finds parents
    reply_digest: Mapped[bytes | None]  # of the conversation up to and with the reply
    prompt_shared: Mapped[int | None]
    prompt_ids: Mapped[bytes | None]  # db.arrays
    response_ids: Mapped[bytes | None]
    logprobs: Mapped[bytes | None]
    sampling: Mapped[Any] = mapped_column(ExactJson)
    finish_reason: Mapped[str | None]
    ends_session: Mapped[bool]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    entered_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    announced_at: Mapped[datetime | None]
    erased_at: Mapped[datetime | None]  # what continues it and began before then has no content any more


class SessionPrefix(Base):
    """Hashes by which a request without a name finds its conversation: two for each turn."""

    __tablename__ = "session_prefixes"
    __table_args__ = (one_of("role", PrefixRole),)

    api_key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    prefix_hash: Mapped[bytes] = mapped_column(primary_key=True)
    turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id", ondelete="CASCADE"), primary_key=True)
    role: Mapped[str]


class Recipe(Base):
    """Everything learning depends on; never changed, only followed by another."""

    __tablename__ = "recipes"

    hash: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    signal_hash: Mapped[str]  # of the part that judging and samples depend on
    train_hash: Mapped[str]
    content: Mapped[Any] = mapped_column(ExactJson)  # all keys filled in
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))


class Judgement(Base):
    """What is held of a turn under one recipe; revision 0 is by its next state."""

    __tablename__ = "judgements"
    __table_args__ = (
        UniqueConstraint("turn_id", "recipe_hash", "revision"),
        CheckConstraint("verdict BETWEEN -1 AND 1", name="verdict"),
        CheckConstraint("(decided_at IS NULL) = (outcome IS NULL)", name="decided"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id"))
    recipe_hash: Mapped[str] = mapped_column(ForeignKey("recipes.hash"))
    revision: Mapped[int]
    shown_by: Mapped[UUID | None] = mapped_column(ForeignKey("turns.id"))  # whose request showed the next state
    evidence_hash: Mapped[bytes]
    verdict: Mapped[int | None]
    expected: Mapped[float | None]
    reward: Mapped[float | None]  # of its own verdict, before it is set in relation to others
    verdict_why: Mapped[str | None]
    hint: Mapped[str | None]
    hint_why: Mapped[str | None]
    not_trainable: Mapped[str | None]  # why its turn cannot be trained, whatever the verdict
    outcome: Mapped[str | None]
    why: Mapped[str | None]
    opened_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    decided_at: Mapped[datetime | None]


class Vote(Base):
    """One answer of a judge, as it came. Asked for once."""

    __tablename__ = "votes"
    __table_args__ = (CheckConstraint("score BETWEEN -1 AND 1", name="score"),)

    judgement_id: Mapped[UUID] = mapped_column(ForeignKey("judgements.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    raw: Mapped[str]
    score: Mapped[int | None]  # None: it could not be read
    answered_at: Mapped[datetime] = mapped_column(server_default=text("now()"))


class Hint(Base):
    """One answer of a judge about what should have been known, as it came. Asked for once."""

    __tablename__ = "hints"

    judgement_id: Mapped[UUID] = mapped_column(ForeignKey("judgements.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    raw: Mapped[str]
    accepted: Mapped[bool | None]  # None: it could not be read
    text: Mapped[str | None]
    answered_at: Mapped[datetime] = mapped_column(server_default=sql("now()"))


class Feedback(Base):
    """What somebody said about a turn outside the conversation."""

    __tablename__ = "feedback"
    __table_args__ = (
        CheckConstraint("score BETWEEN -1 AND 1", name="score"),
        CheckConstraint("score IS NOT NULL OR text IS NOT NULL", name="says_something"),
        Index(None, "turn_id"),
        Index("feedback_unapplied_idx", "id", postgresql_where=sql("applied_at IS NULL")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id"))
    api_key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"))
    score: Mapped[float | None]
    text: Mapped[str | None]
    effect: Mapped[str]
    received_at: Mapped[datetime] = mapped_column(server_default=sql("now()"))
    announced_at: Mapped[datetime | None]  # its session's workflow was told
    applied_at: Mapped[datetime | None]  # a judgement has taken it in


class Sample(Base):
    """A judgement made trainable. Ids and log-probs are its turn's."""

    __tablename__ = "samples"
    __table_args__ = (
        one_of("state", SampleState),
        CheckConstraint("coalesce(reward, 0) <> 0 OR hinted_prompt_ids IS NOT NULL", name="has_gradient"),
        CheckConstraint("octet_length(hinted_prompt_ids) % 4 = 0", name="ids_are_whole"),
        Index(None, "policy", "state", "id"),
        Index(None, "turn_id"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    judgement_id: Mapped[UUID] = mapped_column(ForeignKey("judgements.id"), unique=True)
    turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id"))
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    state: Mapped[str]
    reason: Mapped[str]
    reward: Mapped[float | None]  # None: no reward term
    hinted_prompt_ids: Mapped[bytes | None]  # db.arrays; None: no teacher term
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))


class Engine(Base):
    """One vLLM server."""

    __tablename__ = "engines"

    id: Mapped[str] = mapped_column(primary_key=True)
    url: Mapped[str] = mapped_column(unique=True)
    draining: Mapped[bool] = mapped_column(server_default=text("false"))
    problem: Mapped[str | None]  # why its agent took it out of rotation; None: it works, or has no agent
    added_by: Mapped[str | None]  # the installation whose `clawloop up` or gateway added it; None: a person
    added_at: Mapped[datetime] = mapped_column(server_default=text("now()"))


class EngineVersion(Base):
    """An engine has this version loaded."""

    __tablename__ = "engine_versions"
    __table_args__ = (ForeignKeyConstraint(["policy", "version"], ["versions.policy", "versions.n"]),)

    engine_id: Mapped[str] = mapped_column(ForeignKey("engines.id", ondelete="CASCADE"), primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    loaded_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
