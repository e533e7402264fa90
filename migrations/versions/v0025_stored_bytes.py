"""What each key stores, and how much it may."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_CONTENT = (
    *("messages_added", "response", "sampling", "evidence", "error", "prompt_ids", "response_ids", "logprobs"),
    *("tools_sha256", "kind_reason"),
)


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("stored_mib", sa.Integer(), nullable=True))
    op.add_column("turns", sa.Column("stored_bytes", sa.BigInteger(), nullable=True))
    op.create_table(
        "stored_bytes",
        sa.Column("api_key_id", sa.UUID(), nullable=False),
        sa.Column("id", sa.BigInteger(), sa.Identity(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("api_key_id", "id", name=op.f("stored_bytes_pkey")),
    )
    # Sizes as compressed: what is longer than a page is not read for them.
    sizes = " + ".join(f"coalesce(pg_column_size(t.{column}), 0)" for column in _CONTENT)
    op.execute(f"""
        INSERT INTO stored_bytes (api_key_id, bytes)
        SELECT s.api_key_id, sum(1024 + {sizes}) FROM turns t JOIN sessions s ON s.id = t.session_id
        WHERE t.outcome <> 'erased' GROUP BY s.api_key_id
        UNION ALL
        SELECT s.api_key_id, sum(f.size_bytes) FROM turn_files r JOIN files f ON f.id = r.file_id
            JOIN turns t ON t.id = r.turn_id JOIN sessions s ON s.id = t.session_id GROUP BY s.api_key_id
    """)


def downgrade() -> None:
    op.drop_table("stored_bytes")
    op.drop_column("turns", "stored_bytes")
    op.drop_column("api_keys", "stored_mib")
