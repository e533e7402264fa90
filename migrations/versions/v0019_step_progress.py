"""What the newest attempt at a step does, and since when."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("steps", sa.Column("attempt_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("steps", sa.Column("progress", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("steps", "progress")
    op.drop_column("steps", "attempt_at")
