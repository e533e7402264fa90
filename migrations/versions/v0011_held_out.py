"""Held-out samples and their turns, and the check of the gate that compares versions on them."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_SAMPLES = "'fresh', 'claimed', 'trained', 'expired', 'quarantined', 'superseded'"
_TURNS = (
    "'waiting', 'side', 'no_feedback', 'not_trainable', 'unjudged', 'undecided', 'sampled'",
    "'trained', 'expired', 'quarantined', 'rolled_back', 'erased'",
)


def upgrade() -> None:
    _only("samples", "state", f"{_SAMPLES}, 'held_out'")
    _only("turns", "outcome", f"{_TURNS[0]}, 'held_out', {_TURNS[1]}")
    _only("gate_checks", "name", "'numbers', 'replay'")
    _only("gate_checks", "result", "'passed', 'not_enough', 'failed'")


def downgrade() -> None:
    # Earlier code holds nothing out: it trains these samples.
    op.execute("UPDATE samples SET state = 'fresh' WHERE state = 'held_out'")
    op.execute("UPDATE turns SET outcome = 'sampled' WHERE outcome = 'held_out'")
    op.execute("DELETE FROM gate_checks WHERE name = 'replay'")
    _only("gate_checks", "result", "'passed', 'failed'")
    _only("gate_checks", "name", "'numbers'")
    _only("turns", "outcome", ", ".join(_TURNS))
    _only("samples", "state", _SAMPLES)


def _only(table: str, column: str, values: str) -> None:
    op.drop_constraint(op.f(f"{table}_{column}_check"), table)
    op.create_check_constraint(op.f(f"{table}_{column}_check"), table, f"{column} IN ({values})")
