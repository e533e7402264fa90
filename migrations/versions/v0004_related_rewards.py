"""Related rewards: a policy's verdict count and total, an index of groups, task outcomes of sessions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("verdict_count", "verdict_total"):
        op.add_column("policies", sa.Column(name, sa.Integer(), server_default=sa.text("0"), nullable=False))
    op.add_column("sessions", sa.Column("task_outcome", sa.Integer(), nullable=True))
    op.create_check_constraint(op.f("sessions_task_outcome_check"), "sessions", "task_outcome IN (-1, 1)")
    op.execute("""
        UPDATE policies p SET verdict_count = seen.count, verdict_total = seen.total
        FROM (
            SELECT s.policy, count(*) AS count, sum(j.verdict) AS total
            FROM judgements j JOIN turns t ON t.id = j.turn_id JOIN sessions s ON s.id = t.session_id
            WHERE j.verdict <> 0 AND j.decided_at IS NOT NULL GROUP BY s.policy) seen
        WHERE seen.policy = p.id""")
    op.create_index("turns_group_idx", "turns", ["group_id"], postgresql_where=sa.text("group_id IS NOT NULL"))


def downgrade() -> None:
    op.drop_index("turns_group_idx", table_name="turns")
    op.drop_column("sessions", "task_outcome")
    for name in ("verdict_total", "verdict_count"):
        op.drop_column("policies", name)
