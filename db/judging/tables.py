"""Rows of judgements with their votes and hints, and of feedback."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint, func, text
from sqlalchemy import text as sql  # where a column is called text
from sqlalchemy.orm import Mapped, mapped_column

from db.content import ExactJson
from db.declarative import Base


def newest_judgement(turn: str) -> str:
    """SQL for the newest decided judgement of the turn with this id, in parentheses."""
    return f"""(
        SELECT * FROM judgements WHERE turn_id = {turn} AND decided_at IS NOT NULL
        ORDER BY revision DESC, decided_at DESC LIMIT 1)"""


HINT_SOURCE = """(
    SELECT CASE WHEN EXISTS (SELECT FROM practice WHERE turn_id = j.turn_id) THEN 'lessons'
        WHEN r.content->'signal'->>'hints_from' = 'message' THEN 'message' ELSE 'judge' END
    FROM recipes r WHERE r.hash = j.recipe_hash) AS hint_source"""
"""SQL for `clawloop.core.contracts.views.HintSource` of judgement `j`."""


class JudgementRow(Base):
    """A judgement of a turn under one recipe; revision 0 is by its next state."""

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
    shown_by: Mapped[UUID | None] = mapped_column(
        ForeignKey("turns.id")
    )  # the next turn: its request holds the next state
    evidence_hash: Mapped[bytes]
    verdict: Mapped[int | None]
    expected: Mapped[float | None]
    reward: Mapped[float | None]  # of its own verdict, before it is related to others
    verdict_why: Mapped[str | None]
    hint: Mapped[str | None]
    hint_why: Mapped[str | None]
    not_trainable: Mapped[str | None]  # why its turn cannot be trained, whatever the verdict
    outcome: Mapped[str | None]
    why: Mapped[str | None]
    opened_at: Mapped[datetime] = mapped_column(server_default=func.now())
    decided_at: Mapped[datetime | None]


class VoteRow(Base):
    """One raw answer of a judge; requested once."""

    __tablename__ = "votes"
    __table_args__ = (
        CheckConstraint("score BETWEEN -1 AND 1", name="score"),
        CheckConstraint("(asked_turn IS NULL) = (asked_choice IS NULL)", name="asked"),
        Index(
            "votes_unrewarded_idx",
            "judgement_id",
            postgresql_where=text("asked_turn IS NOT NULL AND rewarded_at IS NULL"),
        ),
    )

    judgement_id: Mapped[UUID] = mapped_column(ForeignKey("judgements.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    raw: Mapped[str]
    score: Mapped[int | None]  # None: the answer cannot be parsed
    answered_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # The gateway's record of the vote: the request's first turn and the answer's index. The turn may be stored later.
    asked_turn: Mapped[UUID | None]
    asked_choice: Mapped[int | None]
    rewarded_at: Mapped[datetime | None]  # when the judge was rewarded for the vote


class HintRow(Base):
    """One raw answer of a judge with a hint; requested once."""

    __tablename__ = "hints"

    judgement_id: Mapped[UUID] = mapped_column(ForeignKey("judgements.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    index: Mapped[int] = mapped_column(primary_key=True)
    raw: Mapped[str]
    accepted: Mapped[bool | None]  # None: the answer could not be parsed
    text: Mapped[str | None]
    answered_at: Mapped[datetime] = mapped_column(server_default=sql("now()"))


class FeedbackRow(Base):
    """Feedback on a turn, given outside the conversation."""

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
    announced_at: Mapped[datetime | None]  # its session's workflow was notified
    applied_at: Mapped[datetime | None]  # a judgement has taken it into account


class FeedbackRequestRow(Base):
    """A request to give feedback that named itself by an Idempotency-Key, and what it was answered."""

    __tablename__ = "feedback_requests"
    __table_args__ = (Index(None, "received_at"),)

    api_key_id: Mapped[UUID] = mapped_column(ForeignKey("api_keys.id"), primary_key=True)
    key_sha256: Mapped[bytes] = mapped_column(primary_key=True)
    body_sha256: Mapped[bytes]  # of the body after the Idempotency-Key, so that a short comment cannot be guessed
    feedback_id: Mapped[UUID | None]  # None: an outcome. An erasure may have deleted the feedback.
    effect: Mapped[str]
    received_at: Mapped[datetime] = mapped_column(server_default=sql("now()"))


class JudgeTrialRow(Base):
    """The newest trial of a judge on labelled phrases: the form it should take, its biases, how good its votes are."""

    __tablename__ = "judge_trials"

    digest: Mapped[bytes] = mapped_column(primary_key=True)  # of the judge's model
    judge: Mapped[str]
    found: Mapped[Any] = mapped_column(ExactJson)  # a `JudgeTrial`
    tried_at: Mapped[datetime] = mapped_column(server_default=sql("now()"))


class ComparisonRow(Base):
    """Verdict of another judge or recipe on a turn that has a verdict; it changes nothing by itself."""

    __tablename__ = "comparisons"
    __table_args__ = (CheckConstraint("before BETWEEN -1 AND 1 AND after BETWEEN -1 AND 1", name="verdicts"),)

    turn_id: Mapped[UUID] = mapped_column(ForeignKey("turns.id"), primary_key=True)
    signal_hash: Mapped[str] = mapped_column(primary_key=True)  # of the recipe that judged
    judge: Mapped[str] = mapped_column(primary_key=True)
    before: Mapped[int]  # the verdict that stood
    after: Mapped[int | None]  # None: no valid vote
    why: Mapped[str]
    compared_at: Mapped[datetime] = mapped_column(server_default=sql("now()"))
    applied_at: Mapped[datetime | None]  # an operator had the turn judged again because of it
