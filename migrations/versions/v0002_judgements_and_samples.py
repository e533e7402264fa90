"""Recipes, judgements with their votes and hints, feedback, samples; how a session was closed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_CLOSING = ("first_closed_at", "closed_at", "closed_why", "guarantee")


def _moment(name: str, *, nullable: bool = True) -> sa.Column[object]:
    default = None if nullable else sa.text("now()")
    return sa.Column(name, postgresql.TIMESTAMP(timezone=True), server_default=default, nullable=nullable)


def upgrade() -> None:
    op.create_table(
        "recipes",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("signal_hash", sa.Text(), nullable=False),
        sa.Column("train_hash", sa.Text(), nullable=False),
        sa.Column("content", postgresql.JSON(), nullable=False),
        _moment("created_at", nullable=False),
        sa.PrimaryKeyConstraint("hash", name="recipes_pkey"),
    )
    op.add_column("policies", sa.Column("recipe_hash", sa.Text(), nullable=True))
    op.create_foreign_key("policies_recipe_hash_fkey", "policies", "recipes", ["recipe_hash"], ["hash"])
    for name in _CLOSING:
        op.add_column("sessions", _moment(name) if name.endswith("_at") else sa.Column(name, sa.Text(), nullable=True))
    _unannounced("announced_at IS NULL AND kind = 'main'")
    _judgements()
    _answers()
    _feedback()
    _samples()


def _unannounced(where: str) -> None:
    op.execute("DROP INDEX IF EXISTS turns_unannounced_idx")
    op.create_index("turns_unannounced_idx", "turns", ["id"], unique=False, postgresql_where=sa.text(where))


def _judgements() -> None:
    op.create_table(
        "judgements",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("recipe_hash", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("shown_by", sa.Uuid(), nullable=True),
        sa.Column("evidence_hash", sa.LargeBinary(), nullable=False),
        sa.Column("verdict", sa.Integer(), nullable=True),
        sa.Column("expected", sa.Double(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("verdict_why", sa.Text(), nullable=True),
        sa.Column("hint", sa.Text(), nullable=True),
        sa.Column("hint_why", sa.Text(), nullable=True),
        sa.Column("not_trainable", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("why", sa.Text(), nullable=True),
        _moment("opened_at", nullable=False),
        _moment("decided_at"),
        sa.CheckConstraint("verdict BETWEEN -1 AND 1", name=op.f("judgements_verdict_check")),
        sa.CheckConstraint("(decided_at IS NULL) = (outcome IS NULL)", name=op.f("judgements_decided_check")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name="judgements_turn_id_fkey"),
        sa.ForeignKeyConstraint(["shown_by"], ["turns.id"], name="judgements_shown_by_fkey"),
        sa.ForeignKeyConstraint(["recipe_hash"], ["recipes.hash"], name="judgements_recipe_hash_fkey"),
        sa.PrimaryKeyConstraint("id", name="judgements_pkey"),
        sa.UniqueConstraint("turn_id", "recipe_hash", "revision", name="judgements_turn_id_recipe_hash_revision_key"),
    )


def _answers() -> None:
    op.create_table(
        "votes",
        *_answer_key(),
        sa.Column("score", sa.Integer(), nullable=True),
        _moment("answered_at", nullable=False),
        sa.CheckConstraint("score BETWEEN -1 AND 1", name=op.f("votes_score_check")),
        sa.ForeignKeyConstraint(["judgement_id"], ["judgements.id"], name="votes_judgement_id_fkey"),
        sa.PrimaryKeyConstraint("judgement_id", "kind", "index", name="votes_pkey"),
    )
    op.create_table(
        "hints",
        *_answer_key(),
        sa.Column("accepted", sa.Boolean(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        _moment("answered_at", nullable=False),
        sa.ForeignKeyConstraint(["judgement_id"], ["judgements.id"], name="hints_judgement_id_fkey"),
        sa.PrimaryKeyConstraint("judgement_id", "kind", "index", name="hints_pkey"),
    )


def _answer_key() -> list[sa.Column[object]]:
    return [
        sa.Column("judgement_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("raw", sa.Text(), nullable=False),
    ]


def _feedback() -> None:
    op.create_table(
        "feedback",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("api_key_id", sa.Uuid(), nullable=False),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("effect", sa.Text(), nullable=False),
        _moment("received_at", nullable=False),
        _moment("announced_at"),
        _moment("applied_at"),
        sa.CheckConstraint("score BETWEEN -1 AND 1", name=op.f("feedback_score_check")),
        sa.CheckConstraint("score IS NOT NULL OR text IS NOT NULL", name=op.f("feedback_says_something_check")),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name="feedback_turn_id_fkey"),
        sa.ForeignKeyConstraint(["api_key_id"], ["api_keys.id"], name="feedback_api_key_id_fkey"),
        sa.PrimaryKeyConstraint("id", name="feedback_pkey"),
    )
    op.create_index("feedback_turn_id_idx", "feedback", ["turn_id"], unique=False)
    op.create_index(
        "feedback_unapplied_idx", "feedback", ["id"], unique=False, postgresql_where=sa.text("applied_at IS NULL")
    )


def _samples() -> None:
    op.create_table(
        "samples",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("judgement_id", sa.Uuid(), nullable=False),
        sa.Column("turn_id", sa.Uuid(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("hinted_prompt_ids", sa.LargeBinary(), nullable=True),
        _moment("created_at", nullable=False),
        sa.CheckConstraint(
            "state IN ('fresh', 'claimed', 'trained', 'expired', 'quarantined', 'superseded')",
            name=op.f("samples_state_check"),
        ),
        sa.CheckConstraint(
            "coalesce(reward, 0) <> 0 OR hinted_prompt_ids IS NOT NULL", name=op.f("samples_has_gradient_check")
        ),
        sa.CheckConstraint("octet_length(hinted_prompt_ids) % 4 = 0", name=op.f("samples_ids_are_whole_check")),
        sa.ForeignKeyConstraint(["judgement_id"], ["judgements.id"], name="samples_judgement_id_fkey"),
        sa.ForeignKeyConstraint(["turn_id"], ["turns.id"], name="samples_turn_id_fkey"),
        sa.ForeignKeyConstraint(["policy"], ["policies.id"], name="samples_policy_fkey"),
        sa.PrimaryKeyConstraint("id", name="samples_pkey"),
        sa.UniqueConstraint("judgement_id", name="samples_judgement_id_key"),
    )
    op.create_index("samples_policy_state_id_idx", "samples", ["policy", "state", "id"], unique=False)
    op.create_index("samples_turn_id_idx", "samples", ["turn_id"], unique=False)


def downgrade() -> None:
    for table in ("samples", "feedback", "hints", "votes", "judgements"):
        op.drop_table(table)
    _unannounced("announced_at IS NULL")
    for name in _CLOSING:
        op.drop_column("sessions", name)
    op.drop_constraint("policies_recipe_hash_fkey", "policies", type_="foreignkey")
    op.drop_column("policies", "recipe_hash")
    op.drop_table("recipes")
