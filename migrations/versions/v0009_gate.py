"""A step's version is a candidate until the gate accepts or rejects it, with what each check found."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_BEFORE = "'claimed', 'committed', 'abandoned', 'quarantined'"
_AFTER = "'claimed', 'candidate', 'committed', 'abandoned', 'quarantined', 'rejected'"


def upgrade() -> None:
    _states(_AFTER, "state IN ('claimed', 'candidate')")
    op.drop_index("steps_claimed_idx", "steps")
    _open_index("steps_open_idx", "state IN ('claimed', 'candidate')")
    op.add_column("steps", sa.Column("lr_scale", sa.Double(), server_default=sa.text("1"), nullable=False))
    op.create_check_constraint(op.f("steps_lr_scale_check"), "steps", "lr_scale > 0 AND lr_scale <= 1")
    op.add_column("step_samples", sa.Column("without_hint", sa.Text(), nullable=True))
    op.add_column("policies", sa.Column("rejections", sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.create_table(
        "gate_checks",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("result", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("figures", postgresql.JSON(), nullable=False),
        sa.Column("at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("name IN ('numbers')", name=op.f("gate_checks_name_check")),
        sa.CheckConstraint("result IN ('passed', 'failed')", name=op.f("gate_checks_result_check")),
        sa.ForeignKeyConstraint(
            ["policy", "version"], ["versions.policy", "versions.n"], name="gate_checks_policy_version_fkey"
        ),
        sa.PrimaryKeyConstraint("policy", "version", "name", name="gate_checks_pkey"),
    )


def downgrade() -> None:
    op.drop_table("gate_checks")
    # Earlier code knows neither state: a candidate is computed again, a rejected step was quarantined.
    op.execute("""UPDATE samples s SET state = 'fresh' FROM step_samples m, steps p
        WHERE m.sample_id = s.id AND p.policy = m.policy AND p.n = m.step AND p.state = 'candidate'
            AND s.state = 'claimed'""")
    op.execute("""UPDATE steps SET state = 'abandoned', finished_at = now(), reason = 'downgraded'
        WHERE state = 'candidate'""")
    op.execute("UPDATE steps SET state = 'quarantined' WHERE state = 'rejected'")
    op.drop_column("policies", "rejections")
    op.drop_column("step_samples", "without_hint")
    op.drop_constraint(op.f("steps_lr_scale_check"), "steps")
    op.drop_column("steps", "lr_scale")
    op.drop_index("steps_open_idx", "steps")
    _open_index("steps_claimed_idx", "state = 'claimed'")
    _states(_BEFORE, "state = 'claimed'")


def _states(states: str, unfinished: str) -> None:
    op.drop_constraint(op.f("steps_state_check"), "steps")
    op.drop_constraint(op.f("steps_finished_check"), "steps")
    op.create_check_constraint(op.f("steps_state_check"), "steps", f"state IN ({states})")
    op.create_check_constraint(op.f("steps_finished_check"), "steps", f"(finished_at IS NULL) = ({unfinished})")


def _open_index(name: str, unfinished: str) -> None:
    op.create_index(name, "steps", ["policy"], unique=True, postgresql_where=sa.text(unfinished))
