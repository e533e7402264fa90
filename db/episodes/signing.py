"""The secret that episode keys are signed with, read by every gateway and worker; made where there is none."""

from __future__ import annotations

import secrets

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.episodes.keys import SECRET_BYTES
from db.tables import SigningKeyRow

_NAME = "episodes"


async def signing_secret(connection: AsyncConnection) -> bytes:
    """The secret, in the caller's transaction; made if there is none."""
    query = select(SigningKeyRow.secret).where(SigningKeyRow.name == _NAME)
    secret: bytes | None = await connection.scalar(query)
    if secret is None:
        new = insert(SigningKeyRow).values(name=_NAME, secret=secrets.token_bytes(SECRET_BYTES))
        await connection.execute(new.on_conflict_do_nothing())
        secret = (await connection.execute(query)).scalar_one()
    return secret


async def drop_signing_secret(connection: AsyncConnection) -> None:
    """Have a new one made for the next episode. Keys that were handed out stay valid: PostgreSQL has their SHA-256."""
    await connection.execute(delete(SigningKeyRow).where(SigningKeyRow.name == _NAME))
