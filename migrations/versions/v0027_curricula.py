"""A policy's curriculum: which kinds of tasks its rollouts draw, and how hard."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

_INDEX = "rollout_groups_kind_idx"


def upgrade() -> None:
    op.create_table(
        "curriculum_kinds",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("patience", sa.Integer(), nullable=False),
        sa.Column("trial_of", sa.Integer(), nullable=True),
        sa.Column("success_before", sa.Double(), nullable=True),
        sa.Column("why", sa.Text(), server_default=sa.text("''"), nullable=False),
        sa.Column("changed_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("level >= 1 AND (trial_of >= 1) IS NOT FALSE", name=op.f("curriculum_kinds_levels_check")),
        sa.CheckConstraint("weight > 0", name=op.f("curriculum_kinds_weight_check")),
        sa.CheckConstraint("(trial_of IS NULL) = (success_before IS NULL)", name=op.f("curriculum_kinds_trial_check")),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name=op.f("curriculum_kinds_policy_fkey")),
        sa.PrimaryKeyConstraint("policy", "environment", "kind", name=op.f("curriculum_kinds_pkey")),
    )
    op.add_column("rollouts", sa.Column("curriculum", sa.Boolean(), server_default=sa.text("false"), nullable=False))
    op.add_column("rollout_groups", sa.Column("kind", sa.Text(), nullable=True))
    op.add_column("rollout_groups", sa.Column("level", sa.Integer(), nullable=True))
    op.create_check_constraint(op.f("rollout_groups_kind_check"), "rollout_groups", "(kind IS NULL) = (level IS NULL)")
    op.create_index(
        _INDEX,
        "rollout_groups",
        ["policy", "environment", "kind", "level", "id"],
        postgresql_where=sa.text("kind IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index(_INDEX, "rollout_groups")
    op.drop_constraint(op.f("rollout_groups_kind_check"), "rollout_groups", type_="check")
    op.drop_column("rollout_groups", "level")
    op.drop_column("rollout_groups", "kind")
    op.drop_column("rollouts", "curriculum")
    op.drop_table("curriculum_kinds")
