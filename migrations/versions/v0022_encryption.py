"""Encrypted content beside plain content; once a database is encrypted, it refuses plain content.

A trigger rather than a constraint: rows from before may be updated as long as they are not encrypted yet.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_JSON, _TEXT, _BYTES, _DIGEST = "json", "text", "bytes", "digest"
_COLUMNS = {
    "turns": {
        "error": _TEXT,
        "messages_added": _JSON,
        "response": _JSON,
        "sampling": _JSON,
        "prompt_ids": _BYTES,
        "response_ids": _BYTES,
        "logprobs": _BYTES,
        "response_digest": _DIGEST,
        "reply_digest": _DIGEST,
    },
    "session_prefixes": {"prefix_hash": _DIGEST},
    "tool_lists": {"tools": _JSON, "sha256": _DIGEST},
    "judgements": {"hint": _TEXT, "evidence_hash": _DIGEST},
    "votes": {"raw": _TEXT},
    "hints": {"raw": _TEXT, "text": _TEXT},
    "feedback": {"text": _TEXT},
    "samples": {"hinted_prompt_ids": _BYTES},
    "step_samples": {"advantages": _BYTES, "moves": _BYTES},
    "probes": {"content": _JSON},
}
_IS_PLAIN = {
    _TEXT: r"(NEW.{0} NOT IN ('', 'erased')"
    r" AND (NOT starts_with(NEW.{0}, E'\x1asealed:') OR starts_with(NEW.{0}, E'\x1asealed::')))",
    _JSON: "(NEW.{0}::text NOT IN ('[]', '{{}}') AND json_typeof(NEW.{0}) <> 'string')",
    _BYTES: "(octet_length(NEW.{0}) > 0 AND octet_length(NEW.{0}) % 4 <> 2)",
    _DIGEST: "octet_length(NEW.{0}) NOT IN (0, 33)",
}


def _plain_length(column: str) -> str:
    return f"(octet_length({column}) - CASE WHEN octet_length({column}) % 4 = 2 THEN 34 ELSE 0 END)"


def upgrade() -> None:
    op.create_table(
        "encryption",
        sa.Column("only_row", sa.Boolean(), server_default=sa.text("true"), nullable=False),
        sa.Column("check_value", sa.LargeBinary(), nullable=False),
        sa.Column("since", sa.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("only_row", name=op.f("encryption_only_row_check")),
        sa.PrimaryKeyConstraint("only_row", name=op.f("encryption_pkey")),
    )
    lengths, replies = _plain_length("logprobs"), _plain_length("response_ids")
    _replace_checks(
        "octet_length(prompt_ids) % 4 IN (0, 2) AND octet_length(response_ids) % 4 IN (0, 2)",
        f"logprobs IS NULL OR (response_ids IS NOT NULL AND {lengths} IN ({replies}, 2 * {replies}))",
        "octet_length(hinted_prompt_ids) % 4 IN (0, 2)",
    )
    # `clawloop encryption rotate --decrypt` sets the variable, for its own transactions.
    op.execute("""
        CREATE FUNCTION refuse_plain_content() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF current_setting('clawloop.decrypting', true) IS DISTINCT FROM 'on' AND EXISTS (SELECT FROM encryption)
            THEN
                RAISE EXCEPTION 'this database is encrypted: set CLAWLOOP_ENCRYPTION_KEY_FILE'
                    USING ERRCODE = 'object_not_in_prerequisite_state';
            END IF;
            RETURN NEW;
        END $$
    """)
    for table, columns in _COLUMNS.items():
        plain = {column: _IS_PLAIN[form].format(column) for column, form in columns.items()}
        # One for what is inserted: the function is called once a row where nothing is encrypted.
        _trigger(table, "insert", "INSERT", " OR ".join(plain.values()))
        for column, is_plain in plain.items():  # the row's other columns may be plain yet
            _trigger(table, column, f"UPDATE OF {column}", is_plain)


def _trigger(table: str, name: str, event: str, condition: str) -> None:
    statement = f"""
        CREATE TRIGGER refuse_plain_{name} BEFORE {event} ON {table} FOR EACH ROW WHEN ({condition})
        EXECUTE FUNCTION refuse_plain_content()
    """
    op.execute(sa.text(statement.replace(":", r"\:")))


def _replace_checks(turn_ids: str, logprobs: str, sample_ids: str) -> None:
    checks = (
        ("turns", "ids_are_whole", turn_ids),
        ("turns", "logprob_per_id", logprobs),
        ("samples", "ids_are_whole", sample_ids),
    )
    for table, name, check in checks:
        op.drop_constraint(op.f(f"{table}_{name}_check"), table)
        op.create_check_constraint(op.f(f"{table}_{name}_check"), table, check)


def downgrade() -> None:
    op.execute("""
        DO $$ BEGIN
            IF EXISTS (SELECT FROM encryption) THEN
                RAISE EXCEPTION 'this database is encrypted: run clawloop encryption rotate --decrypt first';
            END IF;
        END $$
    """)
    for table, columns in _COLUMNS.items():
        for name in ("insert", *columns):
            op.execute(f"DROP TRIGGER refuse_plain_{name} ON {table}")
    op.execute("DROP FUNCTION refuse_plain_content()")
    _replace_checks(
        "octet_length(prompt_ids) % 4 = 0 AND octet_length(response_ids) % 4 = 0",
        "logprobs IS NULL OR (response_ids IS NOT NULL AND octet_length(logprobs)"
        " IN (octet_length(response_ids), 2 * octet_length(response_ids)))",
        "octet_length(hinted_prompt_ids) % 4 = 0",
    )
    op.drop_table("encryption")
