"""Where a gateway recorded a judge's vote, so that the judge can learn from it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

_INDEX = "votes_unrewarded_idx"


def upgrade() -> None:
    op.add_column("votes", sa.Column("asked_turn", sa.Uuid(), nullable=True))
    op.add_column("votes", sa.Column("asked_choice", sa.Integer(), nullable=True))
    op.add_column("votes", sa.Column("rewarded_at", sa.TIMESTAMP(timezone=True), nullable=True))
    op.create_check_constraint(op.f("votes_asked_check"), "votes", "(asked_turn IS NULL) = (asked_choice IS NULL)")
    op.create_index(
        _INDEX, "votes", ["judgement_id"], postgresql_where=sa.text("asked_turn IS NOT NULL AND rewarded_at IS NULL")
    )


def downgrade() -> None:
    op.drop_index(_INDEX, "votes")
    op.drop_constraint(op.f("votes_asked_check"), "votes", type_="check")
    op.drop_column("votes", "rewarded_at")
    op.drop_column("votes", "asked_choice")
    op.drop_column("votes", "asked_turn")
