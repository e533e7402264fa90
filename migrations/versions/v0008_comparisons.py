"""Comparisons: what another judge or recipe says of turns that have a verdict."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "comparisons",
        sa.Column("turn_id", sa.Uuid(), sa.ForeignKey("turns.id"), primary_key=True),
        sa.Column("signal_hash", sa.Text(), primary_key=True),
        sa.Column("judge", sa.Text(), primary_key=True),
        sa.Column("before", sa.Integer(), nullable=False),
        sa.Column("after", sa.Integer(), nullable=True),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("compared_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("applied_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "before BETWEEN -1 AND 1 AND after BETWEEN -1 AND 1", name=op.f("comparisons_verdicts_check")
        ),
    )


def downgrade() -> None:
    op.drop_table("comparisons")
