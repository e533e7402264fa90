"""Alembic's entry point: runs on the connection that db.schema passes; there is no offline mode."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from db.tables import Base

connection: Connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
