"""Rows of serving: policies with their versions and keys, engines and what each has loaded."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, ForeignKeyConstraint, Identity, false, func, text, true
from sqlalchemy.orm import Mapped, mapped_column

from db.content import ExactJson
from db.declarative import Base


class PolicyRow(Base):
    """A base model plus a tree of adapter versions."""

    __tablename__ = "policies"

    id: Mapped[str] = mapped_column(primary_key=True)
    base_model: Mapped[str]  # the name under which engines serve version 0
    aliases: Mapped[list[str]]
    sampling: Mapped[Any] = mapped_column(ExactJson)  # defaults of fields a client leaves out
    head: Mapped[int]  # newest accepted version
    active: Mapped[int]  # the version that answers new requests
    epoch: Mapped[int] = mapped_column(server_default=text("0"))  # incremented by every roll-back
    pinned: Mapped[int | None]  # stays active whatever is trained
    pool: Mapped[str] = mapped_column(server_default=text("'default'"))  # the trainers that train it
    rejections: Mapped[int] = mapped_column(server_default=text("0"))  # steps in a row without an accepted version
    canary: Mapped[int | None]  # the head, while a share of the conversations gets it and the others the active one
    canary_share: Mapped[float | None]
    canary_since: Mapped[datetime | None]
    paused_reason: Mapped[str | None]
    paused_at: Mapped[datetime | None]
    work_waiting: Mapped[bool] = mapped_column(server_default=false())
    work_signalled_at: Mapped[datetime | None]  # when its training workflow was notified
    recipe_hash: Mapped[str | None] = mapped_column(ForeignKey("recipes.hash"))  # None: the policy does not learn
    general_known: Mapped[int | None]  # of the general questions, by the base model; None: it was not asked yet
    verdict_count: Mapped[int] = mapped_column(server_default=text("0"))  # verdicts of +1 and -1 so far
    verdict_total: Mapped[int] = mapped_column(server_default=text("0"))  # their sum
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    retired_at: Mapped[datetime | None]  # it answers and learns no more, for good


class VersionRow(Base):
    """An adapter that a step made, or that was brought along; version 0 is the base model itself.

    A policy that begins from another policy's version has that version's files as its version 1.
    """

    __tablename__ = "versions"
    __table_args__ = (
        ForeignKeyConstraint(["policy", "parent"], ["versions.policy", "versions.n"]),
        ForeignKeyConstraint(["origin_policy", "origin_n"], ["versions.policy", "versions.n"]),
        CheckConstraint("(n = 0) = (parent IS NULL) AND (n = 0) = (path IS NULL)", name="base"),
        CheckConstraint("(origin_policy IS NULL) = (origin_n IS NULL)", name="origin"),
        CheckConstraint("(lora_rank IS NULL) = (lora_alpha IS NULL)", name="lora"),
    )

    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[int | None]
    path: Mapped[str | None]
    sha256: Mapped[bytes | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    activated_at: Mapped[datetime | None]  # it became the active version
    retired_at: Mapped[datetime | None]  # it stopped being the active version
    removed_at: Mapped[datetime | None]  # its files are gone
    held_out_scores: Mapped[Any | None] = mapped_column(ExactJson)  # by sample, see `StepBatch.parent_scores`
    wanted_until: Mapped[datetime | None]  # engines keep it loaded until then, because a caller will ask it
    # The version of another policy whose files these are; None: a step of this policy made them, or none did.
    origin_policy: Mapped[str | None]
    origin_n: Mapped[int | None]
    # The shape of an adapter that was brought along; None: it is that of the recipe of the step that made it.
    lora_rank: Mapped[int | None]
    lora_alpha: Mapped[float | None]


class TemporalServerRow(Base):
    """The Temporal server that runs this database's workflows; one row."""

    __tablename__ = "temporal_server"
    __table_args__ = (CheckConstraint("only_row", name="only_row"),)

    only_row: Mapped[bool] = mapped_column(primary_key=True, server_default=true())
    namespace_id: Mapped[str]
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    forgotten_at: Mapped[datetime | None]  # what was signalled before is signalled again


class ApiKeyRow(Base):
    """An API key: the public prefix and a hash of the secret."""

    __tablename__ = "api_keys"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    policies: Mapped[list[str]] = mapped_column(server_default=text("'{}'"))  # a header may choose these; `*`: any
    name: Mapped[str]
    prefix: Mapped[str] = mapped_column(unique=True)  # the public part
    secret_sha256: Mapped[bytes]
    scopes: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    revoked_at: Mapped[datetime | None]
    expires_at: Mapped[datetime | None]  # None: it does not expire
    requests_per_minute: Mapped[int | None]  # None here and below: no limit
    tokens_per_minute: Mapped[int | None]
    concurrency: Mapped[int | None]
    stored_mib: Mapped[int | None]
    episode_id: Mapped[UUID | None] = mapped_column(ForeignKey("episodes.id"))  # None: a key of a person or program


class StoredBytesRow(Base):
    """A part of what a key stores; the sum of its rows is all."""

    __tablename__ = "stored_bytes"

    # No foreign key, which would cost each turn a look-up: the turn's session has it.
    api_key_id: Mapped[UUID] = mapped_column(primary_key=True)
    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    bytes: Mapped[int] = mapped_column(BigInteger)  # negative: of what was erased


class EngineRow(Base):
    """One vLLM server."""

    __tablename__ = "engines"

    id: Mapped[str] = mapped_column(primary_key=True)
    url: Mapped[str] = mapped_column(unique=True)
    draining: Mapped[bool] = mapped_column(server_default=false())
    problem: Mapped[str | None]  # why its agent took it out of rotation; None: it works, or has no agent
    added_by: Mapped[str | None]  # the installation whose `clawloop up` or gateway added it; None: a person
    added_at: Mapped[datetime] = mapped_column(server_default=func.now())


class EngineVersionRow(Base):
    """A version that an engine has loaded."""

    __tablename__ = "engine_versions"
    __table_args__ = (ForeignKeyConstraint(["policy", "version"], ["versions.policy", "versions.n"]),)

    engine_id: Mapped[str] = mapped_column(ForeignKey("engines.id", ondelete="CASCADE"), primary_key=True)
    policy: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    loaded_at: Mapped[datetime] = mapped_column(server_default=func.now())
