"""Counts what each key stores: one row for each batch of turns, which the sweep merges.

Rows are only added, so that turns of one key that end together wait for no common row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.ids import ApiKeyId
from db.tables import StoredBytesRow

ROW_BYTES = 1024
"""Beside its content: a turn's row, the hashes by which its conversation is found, and their indexes."""

_CONTENT = (
    *("messages_added", "response", "sampling", "evidence", "error", "prompt_ids", "response_ids", "logprobs"),
    *("tools_sha256", "kind_reason"),
)

_MERGE = text("""
    WITH merged AS (
        DELETE FROM stored_bytes
        WHERE api_key_id IN (SELECT api_key_id FROM stored_bytes GROUP BY api_key_id HAVING count(*) > 1)
        RETURNING api_key_id, bytes)
    INSERT INTO stored_bytes (api_key_id, bytes) SELECT api_key_id, sum(bytes) FROM merged GROUP BY api_key_id
""")


def content_bytes(values: Mapping[str, Any]) -> int:
    """The size of a turn's row.

    Args:
        values: of its columns, as they are stored.
    """
    size = ROW_BYTES
    for column in _CONTENT:
        value = values[column]
        if value is not None:
            size += len(value.encode()) if isinstance(value, str) else len(value)
    return size


async def add_stored_bytes(connection: AsyncConnection, key: ApiKeyId, size: int) -> None:
    """
    Args:
        size: negative for what is erased.
    """
    if size:
        await connection.execute(insert(StoredBytesRow).values(api_key_id=key, bytes=size))


async def merge_stored_bytes(connection: AsyncConnection) -> int:
    """Merge the rows of each key into one; returns the number of keys that had several."""
    return (await connection.execute(_MERGE)).rowcount
