"""Rollout groups and episodes, their keys, and which turns and samples are theirs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TIME = sa.TIMESTAMP(timezone=True)
_UNANNOUNCED = "announced_at IS NULL AND kind = 'main'"


def upgrade() -> None:
    op.create_table(
        "rollout_groups",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("scored", sa.Integer(), nullable=True),
        sa.Column("mean_reward", sa.Double(), nullable=True),
        sa.Column("created_at", _TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("finished_at", _TIME, nullable=True),
        sa.CheckConstraint("state IN ('open', 'settled', 'dropped')", name=op.f("rollout_groups_state_check")),
        sa.CheckConstraint("size >= 2", name=op.f("rollout_groups_size_check")),
        sa.CheckConstraint("(finished_at IS NULL) = (state = 'open')", name=op.f("rollout_groups_finished_check")),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name=op.f("rollout_groups_policy_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("rollout_groups_pkey")),
    )
    op.create_index(op.f("rollout_groups_policy_id_idx"), "rollout_groups", ["policy", "id"])
    op.create_table(
        "episodes",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("group_id", sa.Uuid(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("ending", sa.Text(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("advantage", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("artifact_sha256", sa.LargeBinary(), nullable=True),
        sa.Column("started_at", _TIME, server_default=sa.text("now()"), nullable=False),
        sa.Column("ended_at", _TIME, nullable=True),
        sa.CheckConstraint(
            "state IN ('running', 'ended', 'scored', 'unscored', 'abandoned')", name=op.f("episodes_state_check")
        ),
        sa.CheckConstraint(
            "ending IN ('completed', 'truncated_turns', 'truncated_tokens', 'truncated_time', 'agent_error',"
            " 'infrastructure')",
            name=op.f("episodes_ending_check"),
        ),
        sa.CheckConstraint("(state = 'scored') = (reward IS NOT NULL)", name=op.f("episodes_scored_check")),
        sa.CheckConstraint("(state = 'running') = (ended_at IS NULL)", name=op.f("episodes_ended_check")),
        sa.ForeignKeyConstraint(["group_id"], ["rollout_groups.id"], name=op.f("episodes_group_id_fkey")),
        sa.PrimaryKeyConstraint("id", name=op.f("episodes_pkey")),
        sa.UniqueConstraint("group_id", "place", "attempt", name=op.f("episodes_group_id_place_attempt_key")),
    )
    op.create_index("episodes_running_idx", "episodes", ["id"], postgresql_where=sa.text("state = 'running'"))
    op.create_table(
        "signing_keys",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", _TIME, server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("signing_keys_pkey")),
    )
    op.add_column("api_keys", sa.Column("expires_at", _TIME, nullable=True))
    op.add_column("api_keys", sa.Column("episode_id", sa.Uuid(), nullable=True))
    op.create_foreign_key(op.f("api_keys_episode_id_fkey"), "api_keys", "episodes", ["episode_id"], ["id"])
    op.add_column("turns", sa.Column("episode_id", sa.Uuid(), nullable=True))
    op.create_foreign_key(op.f("turns_episode_id_fkey"), "turns", "episodes", ["episode_id"], ["id"])
    op.create_index(
        "turns_episode_idx", "turns", ["episode_id", "id"], postgresql_where=sa.text("episode_id IS NOT NULL")
    )
    op.drop_index("turns_unannounced_idx", table_name="turns")
    op.create_index(
        "turns_unannounced_idx",
        "turns",
        ["id"],
        postgresql_where=sa.text(f"{_UNANNOUNCED} AND episode_id IS NULL"),
    )
    op.add_column("samples", sa.Column("rollout_group_id", sa.Uuid(), nullable=True))
    op.create_foreign_key(
        op.f("samples_rollout_group_id_fkey"), "samples", "rollout_groups", ["rollout_group_id"], ["id"]
    )
    op.create_index(
        "samples_group_idx",
        "samples",
        ["policy", "rollout_group_id", "state"],
        postgresql_where=sa.text("rollout_group_id IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("samples_group_idx", table_name="samples")
    op.drop_column("samples", "rollout_group_id")
    op.drop_index("turns_unannounced_idx", table_name="turns")
    op.create_index("turns_unannounced_idx", "turns", ["id"], postgresql_where=sa.text(_UNANNOUNCED))
    op.drop_index("turns_episode_idx", table_name="turns")
    op.drop_column("turns", "episode_id")
    # What authorised episodes must authorise nothing without their columns.
    op.execute("UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE episode_id IS NOT NULL")
    op.drop_column("api_keys", "episode_id")
    op.drop_column("api_keys", "expires_at")
    op.drop_table("signing_keys")
    op.drop_index("episodes_running_idx", table_name="episodes")
    op.drop_table("episodes")
    op.drop_index(op.f("rollout_groups_policy_id_idx"), table_name="rollout_groups")
    op.drop_table("rollout_groups")
