"""Stores each key's limits, and reads its use."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.serving import KeyLimits, KeyUse
from clawloop.ids import ApiKeyId
from db.database import Database, transaction
from db.exact_json import storable
from db.tables import ApiKeyRow, SessionRow, StoredBytesRow


class PostgresKeyUses:
    """Implements `api.ports.KeyUses`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def use_of(self, connection: AsyncConnection, prefix: str) -> KeyUse | None:
        return await _read(connection, prefix)

    @transaction
    async def set_limits(self, connection: AsyncConnection, prefix: str, limits: KeyLimits) -> KeyUse | None:
        row = update(ApiKeyRow).where(ApiKeyRow.prefix == storable(prefix), ApiKeyRow.episode_id.is_(None))
        await connection.execute(
            row.values(
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                concurrency=limits.concurrency,
                stored_mib=limits.stored_mib,
            )
        )
        return await _read(connection, prefix)

    @transaction
    async def stored_bytes(self, connection: AsyncConnection, keys: Sequence[ApiKeyId]) -> dict[ApiKeyId, int]:
        total = func.sum(StoredBytesRow.bytes)
        of_keys = select(StoredBytesRow.api_key_id, total).where(StoredBytesRow.api_key_id.in_(keys))
        rows = (await connection.execute(of_keys.group_by(StoredBytesRow.api_key_id))).all()
        return {ApiKeyId(key): int(size) for key, size in rows}


async def _read(connection: AsyncConnection, prefix: str) -> KeyUse | None:
    newest = select(func.max(SessionRow.last_turn_at)).where(SessionRow.api_key_id == ApiKeyRow.id)
    stored = select(func.coalesce(func.sum(StoredBytesRow.bytes), 0)).where(StoredBytesRow.api_key_id == ApiKeyRow.id)
    query = select(
        ApiKeyRow.__table__,
        newest.scalar_subquery().label("last_turn_at"),
        stored.scalar_subquery().label("stored_bytes"),
    )
    of_people = query.where(ApiKeyRow.prefix == storable(prefix), ApiKeyRow.episode_id.is_(None))
    row = (await connection.execute(of_people)).mappings().one_or_none()
    if row is None:
        return None
    return KeyUse(
        prefix=row["prefix"],
        name=row["name"],
        policy=row["policy"],
        limits=KeyLimits(row["requests_per_minute"], row["tokens_per_minute"], row["concurrency"], row["stored_mib"]),
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_turn_at=row["last_turn_at"],
        stored_bytes=max(0, int(row["stored_bytes"])),
    )
