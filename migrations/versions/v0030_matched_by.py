"""How a turn's parent was found, and what a turn was asked as matched."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("matched_by", sa.Text()))
    op.add_column("turns", sa.Column("asked_digest", sa.LargeBinary()))
    op.create_check_constraint(op.f("turns_matched_by_check"), "turns", "matched_by IN ('context', 'place', 'reply')")


def downgrade() -> None:
    op.drop_constraint(op.f("turns_matched_by_check"), "turns")
    op.drop_column("turns", "asked_digest")
    op.drop_column("turns", "matched_by")
