"""The one Temporal server that runs this database's workflows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "temporal_server",
        sa.Column("only_row", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("namespace_id", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("only_row", name=op.f("temporal_server_only_row_check")),
        sa.PrimaryKeyConstraint("only_row", name=op.f("temporal_server_pkey")),
    )


def downgrade() -> None:
    op.drop_table("temporal_server")
