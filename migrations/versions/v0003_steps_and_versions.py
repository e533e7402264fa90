"""Steps with their batches, times of versions, events; pins and pools of policies, problems of engines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_MOMENTS = {
    "policies": ("paused_at", "work_signalled_at"),
    "versions": ("activated_at", "retired_at", "removed_at"),
}


def _moment(name: str, *, nullable: bool = True) -> sa.Column[object]:
    default = None if nullable else sa.text("now()")
    return sa.Column(name, postgresql.TIMESTAMP(timezone=True), server_default=default, nullable=nullable)


def upgrade() -> None:
    for table, names in _MOMENTS.items():
        for name in names:
            op.add_column(table, _moment(name))
    op.add_column("policies", sa.Column("pinned", sa.Integer(), nullable=True))
    op.add_column("policies", sa.Column("pool", sa.Text(), server_default=sa.text("'default'"), nullable=False))
    op.add_column("engines", sa.Column("problem", sa.Text(), nullable=True))
    op.create_index("turns_waiting_idx", "turns", ["session_id"], postgresql_where=sa.text("outcome = 'waiting'"))
    _steps()
    op.create_table(
        "events",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("detail", postgresql.JSON(), nullable=False),
        _moment("at", nullable=False),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name="events_policy_fkey"),
        sa.PrimaryKeyConstraint("id", name="events_pkey"),
    )
    op.create_index("events_policy_id_idx", "events", ["policy", "id"], unique=False)


def _steps() -> None:
    op.create_table(
        "steps",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("recipe_hash", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("metrics", postgresql.JSON(), nullable=True),
        _moment("claimed_at", nullable=False),
        _moment("finished_at"),
        sa.CheckConstraint(
            "state IN ('claimed', 'committed', 'abandoned', 'quarantined')", name=op.f("steps_state_check")
        ),
        sa.CheckConstraint("(finished_at IS NULL) = (state = 'claimed')", name=op.f("steps_finished_check")),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name="steps_policy_fkey"),
        sa.ForeignKeyConstraint(
            ["policy", "parent"], ["versions.policy", "versions.n"], name="steps_policy_parent_fkey"
        ),
        sa.ForeignKeyConstraint(["recipe_hash"], ["recipes.hash"], name="steps_recipe_hash_fkey"),
        sa.PrimaryKeyConstraint("policy", "n", name="steps_pkey"),
    )
    op.create_index(
        "steps_claimed_idx", "steps", ["policy"], unique=True, postgresql_where=sa.text("state = 'claimed'")
    )
    op.create_table(
        "step_samples",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("sample_id", sa.Uuid(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("dropped", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["policy", "step"], ["steps.policy", "steps.n"], name="step_samples_policy_step_fkey"),
        sa.ForeignKeyConstraint(["sample_id"], ["samples.id"], name="step_samples_sample_id_fkey"),
        sa.PrimaryKeyConstraint("policy", "step", "sample_id", name="step_samples_pkey"),
        sa.UniqueConstraint("policy", "step", "place", name="step_samples_policy_step_place_key"),
    )
    op.create_index("step_samples_sample_id_idx", "step_samples", ["sample_id"], unique=False)


def downgrade() -> None:
    op.drop_index("turns_waiting_idx", "turns")
    for table in ("events", "step_samples", "steps"):
        op.drop_table(table)
    op.drop_column("engines", "problem")
    op.drop_column("policies", "pool")
    op.drop_column("policies", "pinned")
    for table, names in _MOMENTS.items():
        for name in names:
            op.drop_column(table, name)
