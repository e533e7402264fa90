"""Probes, and the check of the gate that asks them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE probes (
            id UUID NOT NULL,
            policy TEXT NOT NULL,
            content JSON NOT NULL,
            created_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
            CONSTRAINT probes_pkey PRIMARY KEY (id),
            CONSTRAINT probes_policy_fkey FOREIGN KEY (policy) REFERENCES policies (id)
        )
    """)
    op.create_index("probes_policy_id_idx", "probes", [sa.text("policy"), sa.text("id")])
    _only("'numbers', 'replay', 'probes'")


def downgrade() -> None:
    op.execute("DELETE FROM gate_checks WHERE name = 'probes'")
    _only("'numbers', 'replay'")
    op.drop_table("probes")


def _only(values: str) -> None:
    op.drop_constraint(op.f("gate_checks_name_check"), "gate_checks")
    op.create_check_constraint(op.f("gate_checks_name_check"), "gate_checks", f"name IN ({values})")
