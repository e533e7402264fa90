"""Policies, keys, engines, sessions and turns."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _policies_and_engines()
    _turns()


def _policies_and_engines() -> None:
    op.create_table(
        "engines",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("draining", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("added_by", sa.Text(), nullable=True),
        sa.Column("added_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name="engines_pkey"),
        sa.UniqueConstraint("url", name="engines_url_key"),
    )
    op.create_table(
        "policies",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("aliases", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("sampling", postgresql.JSON(), nullable=False),
        sa.Column("head", sa.Integer(), nullable=False),
        sa.Column("active", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("paused_reason", sa.Text(), nullable=True),
        sa.Column("work_waiting", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name="policies_pkey"),
    )
    op.create_table(
        "tool_lists",
        sa.Column("sha256", sa.LargeBinary(), nullable=False),
        sa.Column("tools", postgresql.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="tool_lists_pkey"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("revoked_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name="api_keys_policy_fkey"),
        sa.PrimaryKeyConstraint("id", name="api_keys_pkey"),
        sa.UniqueConstraint("prefix", name="api_keys_prefix_key"),
    )
    op.create_table(
        "versions",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("parent", sa.Integer(), nullable=True),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("sha256", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("(n = 0) = (parent IS NULL) AND (n = 0) = (path IS NULL)", name=op.f("versions_base_check")),
        sa.ForeignKeyConstraint(
            ["policy", "parent"], ["versions.policy", "versions.n"], name="versions_policy_parent_fkey"
        ),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name="versions_policy_fkey"),
        sa.PrimaryKeyConstraint("policy", "n", name="versions_pkey"),
    )
    op.create_table(
        "engine_versions",
        sa.Column("engine_id", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("loaded_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["engine_id"], ["engines.id"], name="engine_versions_engine_id_fkey", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["policy", "version"], ["versions.policy", "versions.n"], name="engine_versions_policy_version_fkey"
        ),
        sa.PrimaryKeyConstraint("engine_id", "policy", "version", name="engine_versions_pkey"),
    )


def _turns() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("identified_by", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("last_turn_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.CheckConstraint("state IN ('open', 'ending', 'closed')", name=op.f("sessions_state_check")),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name="sessions_api_key_id_fkey"),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name="sessions_policy_fkey"),
        sa.PrimaryKeyConstraint("id", name="sessions_pkey"),
    )
    op.create_table(
        "turns",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("session_id", sa.Uuid(), nullable=False),
        sa.Column("parent_turn_id", sa.Uuid(), nullable=True),
        sa.Column("group_id", sa.Uuid(), nullable=True),
        sa.Column("choice", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("kind_reason", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("outcome_detail", sa.Text(), nullable=True),
        sa.Column("alias", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("engine_id", sa.Text(), nullable=True),
        sa.Column("evidence", postgresql.JSON(), nullable=False),
        sa.Column("messages_kept", sa.Integer(), nullable=False),
        sa.Column("messages_added", postgresql.JSON(), nullable=False),
        sa.Column("tools_sha256", sa.LargeBinary(), nullable=True),
        sa.Column("response", postgresql.JSON(), nullable=True),
        sa.Column("response_digest", sa.LargeBinary(), nullable=True),
        sa.Column("reply_digest", sa.LargeBinary(), nullable=True),
        sa.Column("prompt_shared", sa.Integer(), nullable=True),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=True),
        sa.Column("response_ids", sa.LargeBinary(), nullable=True),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("sampling", postgresql.JSON(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("ends_session", sa.Boolean(), nullable=False),
        sa.Column("started_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("finished_at", postgresql.TIMESTAMP(timezone=True), nullable=False),
        sa.Column("entered_at", postgresql.TIMESTAMP(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("announced_at", postgresql.TIMESTAMP(timezone=True), nullable=True),
        sa.CheckConstraint("kind IN ('main', 'side')", name=op.f("turns_kind_check")),
        sa.CheckConstraint(
            "outcome IN ('waiting', 'side', 'no_feedback', 'superseded', 'not_trainable', 'unjudged', 'undecided',"
            " 'sampled', 'trained', 'expired', 'quarantined', 'rolled_back', 'erased')",
            name=op.f("turns_outcome_check"),
        ),
        sa.CheckConstraint("status IN ('complete', 'length', 'aborted', 'error')", name=op.f("turns_status_check")),
        sa.CheckConstraint("(prompt_shared IS NULL) = (prompt_ids IS NULL)", name=op.f("turns_prompt_known_check")),
        sa.CheckConstraint(
            "logprobs IS NULL OR (response_ids IS NOT NULL AND octet_length(logprobs)"
            " IN (octet_length(response_ids), 2 * octet_length(response_ids)))",
            name=op.f("turns_logprob_per_id_check"),
        ),
        sa.CheckConstraint(
            "octet_length(prompt_ids) % 4 = 0 AND octet_length(response_ids) % 4 = 0",
            name=op.f("turns_ids_are_whole_check"),
        ),
        sa.CheckConstraint("parent_turn_id < id", name=op.f("turns_parent_is_older_check")),
        sa.CheckConstraint("parent_turn_id IS NOT NULL OR messages_kept = 0", name=op.f("turns_kept_of_parent_check")),
        sa.CheckConstraint(
            "parent_turn_id IS NOT NULL OR prompt_shared = 0", name=op.f("turns_shared_with_parent_check")
        ),
        sa.ForeignKeyConstraint(["parent_turn_id"], ["turns.id"], name="turns_parent_turn_id_fkey"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.id"], name="turns_session_id_fkey"),
        sa.ForeignKeyConstraint(["tools_sha256"], ["tool_lists.sha256"], name="turns_tools_sha256_fkey"),
        sa.PrimaryKeyConstraint("id", name="turns_pkey"),
    )
    op.create_index("turns_parent_turn_id_idx", "turns", ["parent_turn_id"], unique=False)
    op.create_index("turns_session_id_id_idx", "turns", ["session_id", "id"], unique=False)
    op.create_index("turns_session_id_response_digest_idx", "turns", ["session_id", "response_digest"], unique=False)
    op.create_index(
        "turns_unannounced_idx", "turns", ["id"], unique=False, postgresql_where=sa.text("announced_at IS NULL")
    )
    op.create_table(
        "session_prefixes",
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("prefix_hash", sa.LargeBinary(), nullable=False),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.CheckConstraint("role IN ('request', 'reply', 'expected')", name=op.f("session_prefixes_role_check")),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name="session_prefixes_api_key_id_fkey"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name="session_prefixes_turn_id_fkey", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("api_key_id", "prefix_hash", "turn_id", name="session_prefixes_pkey"),
    )


def downgrade() -> None:
    op.drop_table("session_prefixes")
    op.drop_table("turns")
    op.drop_table("sessions")
    op.drop_table("engine_versions")
    op.drop_table("versions")
    op.drop_table("api_keys")
    op.drop_table("tool_lists")
    op.drop_table("policies")
    op.drop_table("engines")
