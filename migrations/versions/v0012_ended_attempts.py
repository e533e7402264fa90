"""How attempts at a step ended, so that those of which nothing was heard can be counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_COLUMNS = ("failed", "interrupted")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("steps", sa.Column(name, sa.Integer(), server_default=sa.text("0"), nullable=False))
    # How the attempts so far ended is not known: counted as unheard of, they would end an open step at its next one.
    op.execute("UPDATE steps SET interrupted = attempt WHERE state = 'claimed'")


def downgrade() -> None:
    for name in _COLUMNS:
        op.drop_column("steps", name)
