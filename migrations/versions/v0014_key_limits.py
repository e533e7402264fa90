"""What each key may use; NULL: as much as it likes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_COLUMNS = ("requests_per_minute", "tokens_per_minute", "concurrency")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("api_keys", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    for name in _COLUMNS:
        op.drop_column("api_keys", name)
