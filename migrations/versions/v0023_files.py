"""Files of messages, each stored once however many turns refer to it.

What was recorded before keeps its images inside its messages; the way back puts all of them there.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

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
_REQUIRE_PLAIN = """
    DO $$ BEGIN
        IF EXISTS (SELECT FROM encryption) THEN
            RAISE EXCEPTION 'this database is encrypted: run clawloop encryption rotate --decrypt first';
        END IF;
    END $$
"""
_FILES = sa.text("""
    SELECT encode(f.digest, 'hex') AS sha256, substr(f.content, 1, f.size_bytes) AS content
    FROM files f JOIN turn_files r ON r.file_id = f.id WHERE r.turn_id = :turn
""")


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
    op.execute(_REQUIRE_PLAIN)
    connection = op.get_bind()
    for turn in connection.scalars(sa.text("SELECT DISTINCT turn_id FROM turn_files")).all():
        files = {row.sha256: bytes(row.content) for row in connection.execute(_FILES, {"turn": turn})}
        messages = connection.scalar(sa.text("SELECT messages_added FROM turns WHERE id = :turn"), {"turn": turn})
        changed = json.dumps(_with_files(messages, files), separators=(",", ":"))
        update = sa.text("UPDATE turns SET messages_added = CAST(:messages AS json) WHERE id = :turn")
        connection.execute(update, {"messages": changed, "turn": turn})
    op.drop_table("turn_files")
    op.drop_table("files")


def _with_files(value: Any, files: Mapping[str, bytes]) -> Any:
    """Messages with the files that they refer to, as clients sent them."""
    if isinstance(value, list):
        return [_with_files(inner, files) for inner in value]
    if not isinstance(value, dict):
        return value
    stored = value.get("stored_file")
    content = files.get(str(stored.get("sha256"))) if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or content is None:
        return {name: _with_files(inner, files) for name, inner in value.items()}
    encoded = base64.b64encode(content).decode()
    return f"data:{stored['media_type']};base64,{encoded}" if "media_type" in stored else encoded
