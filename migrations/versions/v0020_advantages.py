"""The advantage of each token of a reply, as the step that trained it used it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("step_samples", sa.Column("advantages", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("step_samples", "advantages")
