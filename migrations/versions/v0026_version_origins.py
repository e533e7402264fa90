"""A policy may begin from a version of another one, whose files it shares."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("versions", sa.Column("origin_policy", sa.Text(), nullable=True))
    op.add_column("versions", sa.Column("origin_n", sa.Integer(), nullable=True))
    op.create_foreign_key(
        op.f("versions_origin_policy_origin_n_fkey"),
        "versions",
        "versions",
        ["origin_policy", "origin_n"],
        ["policy", "n"],
    )
    op.create_check_constraint(
        op.f("versions_origin_check"), "versions", "(origin_policy IS NULL) = (origin_n IS NULL)"
    )


def downgrade() -> None:
    op.drop_constraint(op.f("versions_origin_check"), "versions", type_="check")
    op.drop_constraint(op.f("versions_origin_policy_origin_n_fkey"), "versions", type_="foreignkey")
    op.drop_column("versions", "origin_n")
    op.drop_column("versions", "origin_policy")
