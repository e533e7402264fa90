"""What operators and the service itself did to policies: written once, never changed."""

from __future__ import annotations

from pydantic import JsonValue
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.ids import new_event_id
from db.exact_json import exact_json
from db.tables import EventRow


async def insert_event(connection: AsyncConnection, policy: str, kind: str, **detail: JsonValue) -> None:
    """In the caller's transaction, so that it happened exactly if this is told."""
    row = {"id": new_event_id(), "policy": policy, "kind": kind, "detail": exact_json(detail)}
    await connection.execute(insert(EventRow).values(row))
