"""How each policy's rollouts run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollouts",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("groups_in_flight", sa.Integer(), nullable=False),
        sa.Column("barren_limit", sa.Integer(), nullable=False),
        sa.Column("next_task", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("paused_reason", sa.Text(), nullable=True),
        sa.Column("started_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("group_size >= 2", name=op.f("rollouts_group_size_check")),
        sa.CheckConstraint("groups_in_flight >= 1", name=op.f("rollouts_groups_in_flight_check")),
        sa.CheckConstraint("barren_limit >= 1", name=op.f("rollouts_barren_limit_check")),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name=op.f("rollouts_policy_fkey")),
        sa.PrimaryKeyConstraint("policy", name=op.f("rollouts_pkey")),
    )


def downgrade() -> None:
    op.drop_table("rollouts")
