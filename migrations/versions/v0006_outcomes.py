"""Removes the turn outcome `superseded`: a reply that later history does not hold is `no_feedback`."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BEFORE = "'waiting', 'side', 'no_feedback'"
_AFTER = (
    "'not_trainable', 'unjudged', 'undecided', 'sampled', 'trained', 'expired', 'quarantined', 'rolled_back', 'erased'"
)


def upgrade() -> None:
    _only(f"{_BEFORE}, {_AFTER}")


def downgrade() -> None:
    _only(f"{_BEFORE}, 'superseded', {_AFTER}")


def _only(outcomes: str) -> None:
    op.drop_constraint(op.f("turns_outcome_check"), "turns")
    op.create_check_constraint(op.f("turns_outcome_check"), "turns", f"outcome IN ({outcomes})")
