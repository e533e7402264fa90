"""Rows of training: recipes, samples, the steps that take them, and what happened to a policy."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint, false, func, text
from sqlalchemy.orm import Mapped, mapped_column

from clawloop.core.contracts.training import CheckResult, SampleState, StepState
from db.content import SEALED_REST, ExactJson
from db.declarative import Base, one_of


class RecipeRow(Base):
    """Everything learning depends on; never changed, only replaced by another."""

    __tablename__ = "recipes"

    hash: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    signal_hash: Mapped[str]  # hash of the recipe's [signal] table: judging and samples depend on it
    train_hash: Mapped[str]
    content: Mapped[Any] = mapped_column(ExactJson)  # with all defaults filled in
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class SampleRow(Base):
    """A trainable judgement; token ids and log-probs are those of its turn."""

    __tablename__ = "samples"
    __table_args__ = (
        one_of("state", SampleState),
        CheckConstraint("coalesce(reward, 0) <> 0 OR hinted_prompts IS NOT NULL", name="has_gradient"),
        CheckConstraint(f"octet_length(hinted_prompts) % 4 IN (0, {SEALED_REST})", name="ids_are_whole"),
        Index(None, "policy", "state", "id"),
        Index(None, "turn_id"),
        Index(
            "samples_group_idx",
            "policy",
            "rollout_group_id",
            "state",
            postgresql_where=text("rollout_group_id IS NOT NULL"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    judgement_id: Mapped[UUID] = mapped_column(ForeignKey("judgements.id"), unique=True)
    turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id"))
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    state: Mapped[str]
    reason: Mapped[str]
    reward: Mapped[float | None]  # None: no reward term
    hinted_prompts: Mapped[bytes | None]  # what each adds to the prompt, by db.content; None: no teacher term
    # A step takes all samples of a rollout group or none; None: a sample of a chat.
    rollout_group_id: Mapped[UUID | None] = mapped_column(ForeignKey("rollout_groups.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class StepRow(Base):
    """One optimiser update on one claimed batch; step n makes version n."""

    __tablename__ = "steps"
    __table_args__ = (
        one_of("state", StepState),
        ForeignKeyConstraint(["policy", "parent"], ["versions.policy", "versions.n"]),
        CheckConstraint("(finished_at IS NULL) = (state IN ('claimed', 'candidate'))", name="finished"),
        CheckConstraint("lr_scale > 0 AND lr_scale <= 1", name="lr_scale"),
        # One step at a time: the next batch belongs to the model that this step makes.
        Index("steps_open_idx", "policy", unique=True, postgresql_where=text("state IN ('claimed', 'candidate')")),
    )

    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[int]
    epoch: Mapped[int]  # the policy's epoch when the batch was claimed; every roll-back increments it
    state: Mapped[str]
    attempt: Mapped[int] = mapped_column(server_default=text("0"))  # number of attempts begun
    attempt_at: Mapped[datetime | None]  # begin of the newest attempt; None: not begun, or waiting for the trainer
    progress: Mapped[str | None]  # current activity, for people; as of a few seconds ago
    tokens_a_second: Mapped[float | None]  # as of a few seconds ago; None: nothing is computed now
    seconds_left: Mapped[float | None]
    failed: Mapped[int] = mapped_column(server_default=text("0"))  # attempts whose trainer could not compute it
    interrupted: Mapped[int] = mapped_column(server_default=text("0"))  # attempts that something else ended
    recipe_hash: Mapped[str] = mapped_column(ForeignKey("recipes.hash"))
    lr_scale: Mapped[float] = mapped_column(server_default=text("1"))  # below 1 after steps without an accepted version
    reason: Mapped[str | None]  # why it was abandoned, quarantined or rejected
    metrics: Mapped[Any | None] = mapped_column(ExactJson)
    claimed_at: Mapped[datetime] = mapped_column(server_default=func.now())
    finished_at: Mapped[datetime | None]


class StepSampleRow(Base):
    """A sample of a step's batch."""

    __tablename__ = "step_samples"
    __table_args__ = (
        ForeignKeyConstraint(["policy", "step"], ["steps.policy", "steps.n"]),
        UniqueConstraint("policy", "step", "place"),
        Index(None, "sample_id"),
    )

    policy: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    sample_id: Mapped[UUID] = mapped_column(ForeignKey("samples.id"), primary_key=True)
    place: Mapped[int]  # order in the batch
    dropped: Mapped[str | None]  # why the step left the sample out
    without_hint: Mapped[str | None]  # why only its verdict was trained
    taught: Mapped[Any | None] = mapped_column(ExactJson)  # overlap and share of each hint; None: no teacher
    advantages: Mapped[bytes | None]  # of each token of the reply, by db.content; None: the step used none
    moves: Mapped[bytes | None]  # each token's change of log-prob, by db.content; None: the recipe did not ask for it


class GateCheckRow(Base):
    """Result of one check of the gate for a version."""

    __tablename__ = "gate_checks"
    __table_args__ = (
        ForeignKeyConstraint(["policy", "version"], ["versions.policy", "versions.n"]),
        one_of("result", CheckResult),
    )

    policy: Mapped[str] = mapped_column(primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    result: Mapped[str]
    reason: Mapped[str]  # for people
    figures: Mapped[Any] = mapped_column(ExactJson)
    at: Mapped[datetime] = mapped_column(server_default=func.now())


class ProbeRow(Base):
    """A prompt that the gate asks of each version, with what a right answer has: an operator's, or a general question
    that the base model answers rightly."""

    __tablename__ = "probes"
    __table_args__ = (Index(None, "policy", "id"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    content: Mapped[Any] = mapped_column(ExactJson)  # a ProbeContent
    general: Mapped[bool] = mapped_column(server_default=false())
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class EventRow(Base):
    """A change of a policy by an operator or by Clawloop."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "policy", "id"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    kind: Mapped[str]  # e.g. paused, resumed, rolled_back, pinned, quarantined
    detail: Mapped[Any] = mapped_column(ExactJson)
    at: Mapped[datetime] = mapped_column(server_default=func.now())
