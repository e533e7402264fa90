"""The tables of steps, their batches and events. `db.tables` hands them on."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, ForeignKeyConstraint, Index, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from clawloop.contracts.training import StepState
from db.declarative import Base, one_of
from db.exact_json import ExactJson


class Step(Base):
    """One optimiser update on one claimed batch; step n makes version n."""

    __tablename__ = "steps"
    __table_args__ = (
        one_of("state", StepState),
        ForeignKeyConstraint(["policy", "parent"], ["versions.policy", "versions.n"]),
        CheckConstraint("(finished_at IS NULL) = (state = 'claimed')", name="finished"),
        # One step at a time: the next batch belongs to the model this step makes.
        Index("steps_claimed_idx", "policy", unique=True, postgresql_where=text("state = 'claimed'")),
    )

    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    n: Mapped[int] = mapped_column(primary_key=True)
    parent: Mapped[int]
    epoch: Mapped[int]
    state: Mapped[str]
    attempt: Mapped[int] = mapped_column(server_default=text("0"))  # how often it was begun
    recipe_hash: Mapped[str] = mapped_column(ForeignKey("recipes.hash"))
    reason: Mapped[str | None]  # why it was abandoned or quarantined
    metrics: Mapped[Any | None] = mapped_column(ExactJson)
    claimed_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    finished_at: Mapped[datetime | None]


class StepSample(Base):
    """A step's batch, in its order."""

    __tablename__ = "step_samples"
    __table_args__ = (
        ForeignKeyConstraint(["policy", "step"], ["steps.policy", "steps.n"]),
        UniqueConstraint("policy", "step", "place"),
        Index(None, "sample_id"),
    )

    policy: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    sample_id: Mapped[UUID] = mapped_column(ForeignKey("samples.id"), primary_key=True)
    place: Mapped[int]
    dropped: Mapped[str | None]  # why the step left it out


class Event(Base):
    """Something an operator or the service itself did to a policy."""

    __tablename__ = "events"
    __table_args__ = (Index(None, "policy", "id"),)

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    kind: Mapped[str]  # e.g. paused, resumed, rolled_back, pinned, quarantined
    detail: Mapped[Any] = mapped_column(ExactJson)
    at: Mapped[datetime] = mapped_column(server_default=text("now()"))
