"""Rows of lessons, of what was practised with them, and of what they are measured by."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, func, literal_column
from sqlalchemy.orm import Mapped, mapped_column

from clawloop.core.contracts.lessons import LessonSource, LessonState
from db.content import SEALED_REST, ExactJson
from db.declarative import Base, one_of


class LessonRow(Base):
    """A sentence that prompts of a policy hold while it is active; its text never changes until it is erased."""

    __tablename__ = "lessons"
    __table_args__ = (
        one_of("state", LessonState),
        one_of("source", LessonSource),
        CheckConstraint("(state = 'erased') = (text = '') AND (state = 'erased') = (digest IS NULL)", name="text"),
        CheckConstraint("(source = 'typed') = (turn_id IS NULL)", name="source_turn"),
        UniqueConstraint("policy", "digest"),
        Index(None, "policy", "id"),
        Index(None, "turn_id"),
        Index(None, "shown_by"),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True)
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    text: Mapped[str]
    digest: Mapped[bytes | None]  # of its words, so that a repeated one is found
    state: Mapped[str]
    why: Mapped[str]
    source: Mapped[str]
    turn_id: Mapped[UUID | None] = mapped_column(ForeignKey("turns.id"))  # the turn that was corrected
    shown_by: Mapped[UUID | None] = mapped_column(ForeignKey("turns.id"))  # the turn that holds the correction
    superseded_by: Mapped[UUID | None] = mapped_column(ForeignKey("lessons.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # When its state last changed; if a correction changed it, when this was said.
    changed_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # Of a learned one, the first version that had learned it; else the newest one that says nothing against it.
    since_version: Mapped[int] = mapped_column(server_default=literal_column("0"))


class PracticeRow(Base):
    """A request that was practised with a set of lessons; once for each set."""

    __tablename__ = "practice"
    __table_args__ = (UniqueConstraint("turn_id"), Index(None, "lessons", postgresql_using="gin"))

    source_turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id"), primary_key=True)  # whose request it is
    lessons: Mapped[list[UUID]] = mapped_column(primary_key=True)  # the active ones, which the teacher reads; sorted
    turn_id: Mapped[UUID | None] = mapped_column(ForeignKey("turns.id"))  # has the sample; None: there is none
    why: Mapped[str]
    practised_at: Mapped[datetime] = mapped_column(server_default=func.now())


class YardstickRow(Base):
    """A reply that was given with a lesson, by which the lesson is measured; no step trains its request."""

    __tablename__ = "yardstick"
    __table_args__ = (
        UniqueConstraint("turn_id"),
        CheckConstraint("(first_version IS NULL) = (with_lesson IS NULL)", name="first"),
        CheckConstraint("turn_id IS NOT NULL OR prompts IS NULL", name="prompts"),
        CheckConstraint(f"octet_length(prompts) % 4 IN (0, {SEALED_REST})", name="ids_are_whole"),
        Index(None, "source_turn_id"),
    )

    lesson_id: Mapped[UUID] = mapped_column(ForeignKey("lessons.id"), primary_key=True)
    source_turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id"), primary_key=True)  # whose request it is
    turn_id: Mapped[UUID | None] = mapped_column(ForeignKey("turns.id"))  # the reply; None: there is none
    why: Mapped[str]
    prompts: Mapped[bytes | None]  # what the prompt is without the lesson; NULL: none, or erased
    first_version: Mapped[int | None]  # the version of the next two
    with_lesson: Mapped[float | None]  # log-prob of the reply with the lesson, in nats
    without: Mapped[Any] = mapped_column(ExactJson)  # by version, without the lesson
