"""Stores what each key may use, and reads how it was used."""

from __future__ import annotations

from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.serving import KeyLimits, KeyUse
from db.database import Database, transaction
from db.exact_json import storable
from db.tables import ApiKeyRow, SessionRow


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
            )
        )
        return await _read(connection, prefix)


async def _read(connection: AsyncConnection, prefix: str) -> KeyUse | None:
    newest = select(func.max(SessionRow.last_turn_at)).where(SessionRow.api_key_id == ApiKeyRow.id)
    query = select(ApiKeyRow.__table__, newest.scalar_subquery().label("last_turn_at"))
    of_people = query.where(ApiKeyRow.prefix == storable(prefix), ApiKeyRow.episode_id.is_(None))
    row = (await connection.execute(of_people)).mappings().one_or_none()
    if row is None:
        return None
    return KeyUse(
        prefix=row["prefix"],
        name=row["name"],
        policy=row["policy"],
        limits=KeyLimits(row["requests_per_minute"], row["tokens_per_minute"], row["concurrency"]),
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_turn_at=row["last_turn_at"],
    )
