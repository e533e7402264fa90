"""Indexes for long sessions: the newest turns with a reply, the trained ones, how many main ones there are."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

_IN_SESSION = "turns_session_id_id_idx"


def upgrade() -> None:
    op.create_index(op.f("turns_session_id_response_digest_id_idx"), "turns", ["session_id", "response_digest", "id"])
    op.create_index(op.f("turns_session_id_reply_digest_id_idx"), "turns", ["session_id", "reply_digest", "id"])
    op.drop_index(op.f("turns_session_id_response_digest_idx"), table_name="turns")
    op.drop_index(op.f(_IN_SESSION), table_name="turns")
    op.create_index(op.f(_IN_SESSION), "turns", ["session_id", "id"], postgresql_include=["kind"])
    op.create_index(
        "turns_trained_idx",
        "turns",
        ["session_id", "id"],
        postgresql_where=sa.text("outcome IN ('trained', 'rolled_back')"),
    )


def downgrade() -> None:
    op.drop_index("turns_trained_idx", table_name="turns")
    op.drop_index(op.f(_IN_SESSION), table_name="turns")
    op.create_index(op.f(_IN_SESSION), "turns", ["session_id", "id"])
    op.create_index(op.f("turns_session_id_response_digest_idx"), "turns", ["session_id", "response_digest"])
    op.drop_index(op.f("turns_session_id_reply_digest_id_idx"), table_name="turns")
    op.drop_index(op.f("turns_session_id_response_digest_id_idx"), table_name="turns")
