"""Rows of sessions and turns."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, func, text
from sqlalchemy.orm import Mapped, mapped_column

from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.turns import MatchedBy, TurnKind, TurnOutcome, TurnStatus
from db.content import SEALED_REST, ExactJson, plain_length
from db.declarative import Base, one_of


class PrefixRole(StrEnum):
    """The part of a conversation that a stored hash covers."""

    REQUEST = "request"  # all messages of the turn's request
    REPLY = "reply"  # all messages and the turn's reply
    EXPECTED = "expected"  # up to a reply in the turn's request whose own turn is not inserted (yet)


class SessionRow(Base):
    """A conversation of one key."""

    __tablename__ = "sessions"
    __table_args__ = (
        one_of("state", SessionState),
        CheckConstraint("task_outcome IN (-1, 1)", name="task_outcome"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    api_key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"))
    external_id: Mapped[str | None]  # the client's own value
    identified_by: Mapped[str]  # SessionSource of its first turn
    state: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    last_turn_at: Mapped[datetime]
    first_closed_at: Mapped[datetime | None]  # when the at-least-one rule was applied
    closed_at: Mapped[datetime | None]  # last time
    closed_why: Mapped[str | None]
    guarantee: Mapped[str | None]  # what the at-least-one rule did, or why it did nothing
    task_outcome: Mapped[int | None]  # 1: its task succeeded, -1: it failed; None: not reported
    erased_at: Mapped[datetime | None]  # turns that began before have no content any more


class ToolListRow(Base):
    """A tool list of requests; each distinct list is stored once."""

    __tablename__ = "tool_lists"

    sha256: Mapped[bytes] = mapped_column(primary_key=True)  # of the JSON text
    tools: Mapped[Any] = mapped_column(ExactJson)


class FileRow(Base):
    """An image or another file of messages, which refer to it by its SHA-256; each is stored once."""

    __tablename__ = "files"
    __table_args__ = (CheckConstraint(f"octet_length(content) % 4 IN (0, {SEALED_REST})", name="content_is_padded"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    digest: Mapped[bytes] = mapped_column(unique=True)  # SHA-256 of the file
    size_bytes: Mapped[int]
    content: Mapped[bytes]  # followed by zeros up to a multiple of 4
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class TurnFileRow(Base):
    """A turn adds a message with this file."""

    __tablename__ = "turn_files"
    __table_args__ = (Index(None, "file_id"),)

    turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id", ondelete="CASCADE"), primary_key=True)
    file_id: Mapped[UUID] = mapped_column(ForeignKey("files.id"), primary_key=True)


class TurnRow(Base):
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
        one_of("matched_by", MatchedBy),
        CheckConstraint("parent_turn_id < id", name="parent_is_older"),  # chains of parents end
        CheckConstraint("parent_turn_id IS NOT NULL OR messages_kept = 0", name="kept_of_parent"),
        CheckConstraint("parent_turn_id IS NOT NULL OR prompt_shared = 0", name="shared_with_parent"),
        CheckConstraint("(prompt_shared IS NULL) = (prompt_ids IS NULL)", name="prompt_known"),
        CheckConstraint(
            f"octet_length(prompt_ids) % 4 IN (0, {SEALED_REST})"
            f" AND octet_length(response_ids) % 4 IN (0, {SEALED_REST})",
            name="ids_are_whole",
        ),
        CheckConstraint(
            f"logprobs IS NULL OR (response_ids IS NOT NULL AND {plain_length('logprobs')}"
            f" IN ({plain_length('response_ids')}, 2 * {plain_length('response_ids')}))",
            name="logprob_per_id",
        ),
        # With the kind it counts a session's main turns without reading their rows.
        Index(None, "session_id", "id", postgresql_include=["kind"]),
        # Candidates for a parent, the newest first, whatever their number.
        Index(None, "session_id", "response_digest", "id"),
        Index(None, "session_id", "reply_digest", "id"),
        Index(None, "parent_turn_id"),
        Index("turns_waiting_idx", "session_id", postgresql_where=text("outcome = 'waiting'")),
        Index("turns_trained_idx", "session_id", "id", postgresql_where=text("outcome IN ('trained', 'rolled_back')")),
        Index("turns_group_idx", "group_id", postgresql_where=text("group_id IS NOT NULL")),
        Index("turns_tools_idx", "tools_sha256", postgresql_where=text("tools_sha256 IS NOT NULL")),
        Index(
            "turns_unannounced_idx",
            "id",
            postgresql_where=text("announced_at IS NULL AND kind = 'main' AND episode_id IS NULL"),
        ),
        Index("turns_lessons_idx", "lessons", postgresql_using="gin", postgresql_where=text("lessons IS NOT NULL")),
        Index("turns_episode_idx", "episode_id", "id", postgresql_where=text("episode_id IS NOT NULL")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    session_id: Mapped[UUID] = mapped_column(ForeignKey("sessions.id"))
    parent_turn_id: Mapped[UUID | None] = mapped_column(ForeignKey("turns.id"))
    matched_by: Mapped[str | None]  # how the parent was found
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
    reply_digest: Mapped[bytes | None]  # of the conversation up to and including the reply
    asked_digest: Mapped[bytes | None]  # of the request as matched: finds replies in other words by their place
    prompt_shared: Mapped[int | None]
    prompt_ids: Mapped[bytes | None]  # encoded by db.content
    response_ids: Mapped[bytes | None]
    logprobs: Mapped[bytes | None]
    sampling: Mapped[Any] = mapped_column(ExactJson)
    stored_bytes: Mapped[int] = mapped_column(BigInteger)  # as inserted; 0 once it is erased, and of practice
    finish_reason: Mapped[str | None]
    ends_session: Mapped[bool]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    entered_at: Mapped[datetime] = mapped_column(server_default=func.now())  # when the row was inserted
    announced_at: Mapped[datetime | None]
    # A turn of an episode: its rollout group decides its outcome, and no session workflow does.
    episode_id: Mapped[UUID | None] = mapped_column(ForeignKey("episodes.id"))
    lessons: Mapped[list[UUID] | None]  # those that its prompt held, in their order; None: it held none
    # turns that continue this one and began before this time have no content any more
    erased_at: Mapped[datetime | None]


class SessionPrefixRow(Base):
    """Hashes by which a request that names no session finds its conversation: two for each turn."""

    __tablename__ = "session_prefixes"
    __table_args__ = (one_of("role", PrefixRole),)

    api_key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    prefix_hash: Mapped[bytes] = mapped_column(primary_key=True)
    turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id", ondelete="CASCADE"), primary_key=True)
    role: Mapped[str]
