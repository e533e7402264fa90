"""Canaries: the head that a share of the sessions gets, and the check of the gate that ends it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("policies", sa.Column("canary", sa.Integer(), nullable=True))
    op.add_column("policies", sa.Column("canary_share", sa.Double(), nullable=True))
    op.add_column("policies", sa.Column("canary_since", sa.DateTime(timezone=True), nullable=True))
    _only("'numbers', 'replay', 'probes', 'canary'")


def downgrade() -> None:
    # Earlier code publishes the head to all sessions.
    op.execute("DELETE FROM gate_checks WHERE name = 'canary'")
    _only("'numbers', 'replay', 'probes'")
    for column in ("canary", "canary_share", "canary_since"):
        op.drop_column("policies", column)


def _only(values: str) -> None:
    op.drop_constraint(op.f("gate_checks_name_check"), "gate_checks")
    op.create_check_constraint(op.f("gate_checks_name_check"), "gate_checks", f"name IN ({values})")
