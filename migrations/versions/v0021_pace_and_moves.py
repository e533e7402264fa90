"""How fast a step is computed, and by how much it moved each token that it trained."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("steps", sa.Column("tokens_a_second", sa.Double(), nullable=True))
    op.add_column("steps", sa.Column("seconds_left", sa.Double(), nullable=True))
    op.add_column("step_samples", sa.Column("moves", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("step_samples", "moves")
    op.drop_column("steps", "seconds_left")
    op.drop_column("steps", "tokens_a_second")
