"""Rows of episodes: rollout groups, their episodes, what a policy's rollouts are set to."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, false, func, text
from sqlalchemy.orm import Mapped, mapped_column

from clawloop.core.contracts.episodes import Ending, EpisodeState, GroupState
from db.declarative import Base, one_of


class RolloutGroupRow(Base):
    """k episodes of one task by one policy, compared with each other."""

    __tablename__ = "rollout_groups"
    __table_args__ = (
        one_of("state", GroupState),
        CheckConstraint("size >= 2", name="size"),
        CheckConstraint("(finished_at IS NULL) = (state = 'open')", name="finished"),
        CheckConstraint("(kind IS NULL) = (level IS NULL)", name="kind"),
        Index(None, "policy", "id"),
        Index(
            "rollout_groups_kind_idx",
            *("policy", "environment", "kind", "level", "id"),
            postgresql_where=text("kind IS NOT NULL"),
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    environment: Mapped[str]
    task: Mapped[str]  # its id in the environment
    kind: Mapped[str | None]  # that a curriculum chose, at this level
    level: Mapped[int | None]
    size: Mapped[int]
    state: Mapped[str]
    reason: Mapped[str | None]
    scored: Mapped[int | None]  # how many of its episodes have a reward
    mean_reward: Mapped[float | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    finished_at: Mapped[datetime | None]


class EpisodeRow(Base):
    """One attempt at a task, in a sandbox of its own, with a key of its own: the `api_keys` row of the same id."""

    __tablename__ = "episodes"
    __table_args__ = (
        one_of("state", EpisodeState),
        one_of("ending", Ending),
        CheckConstraint("(state = 'scored') = (reward IS NOT NULL)", name="scored"),
        CheckConstraint("(state = 'running') = (ended_at IS NULL)", name="ended"),
        UniqueConstraint("group_id", "place", "attempt"),
        Index("episodes_running_idx", "id", postgresql_where=text("state = 'running'")),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    group_id: Mapped[UUID] = mapped_column(ForeignKey("rollout_groups.id"))
    place: Mapped[int]  # in the group, from 0
    attempt: Mapped[int]  # from 1
    state: Mapped[str]
    ending: Mapped[str | None]
    reward: Mapped[float | None]
    advantage: Mapped[float | None]  # of all its turns; None if none, or if each turn has its own
    reason: Mapped[str | None]
    artifact_sha256: Mapped[bytes | None]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class RolloutsRow(Base):
    """Settings of a policy's rollouts, and whether they are paused."""

    __tablename__ = "rollouts"
    __table_args__ = (
        CheckConstraint("group_size >= 2", name="group_size"),
        CheckConstraint("groups_in_flight >= 1", name="groups_in_flight"),
        CheckConstraint("barren_limit >= 1", name="barren_limit"),
    )

    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    environment: Mapped[str]
    group_size: Mapped[int]
    groups_in_flight: Mapped[int]
    barren_limit: Mapped[int]  # groups in a row without a sample, after which rollouts pause
    next_task: Mapped[int] = mapped_column(server_default=text("0"))  # number of the next training task
    paused_reason: Mapped[str | None]
    curriculum: Mapped[bool] = mapped_column(server_default=false())
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())  # last time


class CurriculumKindRow(Base):
    """Weight and level of a kind of task for a policy; see `clawloop.core.episodes.curriculum`."""

    __tablename__ = "curriculum_kinds"
    __table_args__ = (
        CheckConstraint("level >= 1 AND (trial_of >= 1) IS NOT FALSE", name="levels"),
        CheckConstraint("weight > 0", name="weight"),
        CheckConstraint("(trial_of IS NULL) = (success_before IS NULL)", name="trial"),
    )

    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    environment: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    level: Mapped[int]
    weight: Mapped[float]
    patience: Mapped[int]  # episodes to be counted before it is changed
    trial_of: Mapped[int | None]  # the level before a change that is on trial
    success_before: Mapped[float | None]  # at that level
    why: Mapped[str] = mapped_column(server_default=text("''"))  # it changed last
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())  # groups made since then are counted


class SigningKeyRow(Base):
    """The secret that episode keys are signed with; one row."""

    __tablename__ = "signing_keys"

    name: Mapped[str] = mapped_column(primary_key=True)
    secret: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
