"""Erasure times of sessions and turns; an index of turns by their tools."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("sessions", sa.Column("erased_at", sa.TIMESTAMP(timezone=True), nullable=True))
    op.add_column("turns", sa.Column("erased_at", sa.TIMESTAMP(timezone=True), nullable=True))
    op.create_index("turns_tools_idx", "turns", ["tools_sha256"], postgresql_where=sa.text("tools_sha256 IS NOT NULL"))


def downgrade() -> None:
    op.drop_index("turns_tools_idx", table_name="turns")
    op.drop_column("turns", "erased_at")
    op.drop_column("sessions", "erased_at")
