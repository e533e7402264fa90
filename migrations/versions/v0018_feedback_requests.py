"""Requests to give feedback that name themselves by an Idempotency-Key, and what they were answered."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "feedback_requests",
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("key_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("body_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("feedback_id", sa.Uuid(), nullable=True),
        sa.Column("effect", sa.Text(), nullable=False),
        sa.Column("received_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name=op.f("feedback_requests_api_key_id_fkey")),
        sa.PrimaryKeyConstraint("api_key_id", "key_sha256", name=op.f("feedback_requests_pkey")),
    )
    op.create_index(op.f("feedback_requests_received_at_idx"), "feedback_requests", ["received_at"])


def downgrade() -> None:
    op.drop_table("feedback_requests")
