"""Files of messages, each stored once however many turns refer to it.

What was recorded before keeps its images inside its messages.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_IS_PLAIN = {
    "content": "octet_length(NEW.content) > 0 AND octet_length(NEW.content) % 4 <> 2",
    "digest": "octet_length(NEW.digest) NOT IN (0, 33)",
}
# A message with a reference is no message to the version before: a person decides what becomes of it.
_NONE_THERE = """
    DO $$ BEGIN
        IF EXISTS (SELECT FROM files) THEN
            RAISE EXCEPTION 'turns refer to files, which the version before cannot read: erase those sessions first';
        END IF;
    END $$
"""


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("size_bytes", sa.Integer(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("octet_length(content) % 4 IN (0, 2)", name=op.f("files_content_is_padded_check")),
        sa.PrimaryKeyConstraint("id", name=op.f("files_pkey")),
        sa.UniqueConstraint("digest", name=op.f("files_digest_key")),
    )
    # Pictures are compressed already.
    op.execute("ALTER TABLE files ALTER COLUMN content SET STORAGE EXTERNAL")
    op.create_table(
        "turn_files",
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("file_id", sa.Uuid(), nullable=False),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name=op.f("turn_files_turn_id_fkey"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["file_id"], ["files.id"], name=op.f("turn_files_file_id_fkey")),
        sa.PrimaryKeyConstraint("turn_id", "file_id", name=op.f("turn_files_pkey")),
    )
    op.create_index(op.f("turn_files_file_id_idx"), "turn_files", ["file_id"])
    _trigger("insert", "INSERT", " OR ".join(f"({is_plain})" for is_plain in _IS_PLAIN.values()))
    for column, is_plain in _IS_PLAIN.items():
        _trigger(column, f"UPDATE OF {column}", is_plain)


def _trigger(name: str, event: str, condition: str) -> None:
    op.execute(f"""
        CREATE TRIGGER refuse_plain_{name} BEFORE {event} ON files FOR EACH ROW WHEN ({condition})
        EXECUTE FUNCTION refuse_plain_content()
    """)


def downgrade() -> None:
    op.execute(_NONE_THERE)
    op.drop_table("turn_files")
    op.drop_table("files")
