"""Stores policies, and reads the directory that the gateway routes by."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.serving import Directory, Policy
from clawloop.errors import SetupError
from db.database import Database, transaction
from db.exact_json import exact_json
from db.serving.engines import read_engines
from db.tables import PolicyRow, VersionRow

DEFAULT_SAMPLING: dict[str, JsonValue] = {
    "temperature": 0.6,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling of a client that sets nothing; a turn sampled with it can be trained."""


class PostgresDirectoryStore:
    """Implements `clawloop.serving.directory.DirectoryStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @transaction
    async def read(self, connection: AsyncConnection) -> Directory:
        policies = [
            Policy(
                id=row.id,
                base_model=row.base_model,
                aliases=tuple(row.aliases),
                active=row.active,
                sampling=row.sampling,
                canary=None if row.pinned is not None else row.canary,
                canary_share=row.canary_share or 0.0,
            )
            for row in await connection.execute(
                select(PolicyRow).where(PolicyRow.retired_at.is_(None)).order_by(PolicyRow.id)
            )
        ]
        return Directory(tuple(policies), tuple(await read_engines(connection)))


async def ensure_policy(database: Database, policy: str, base_model: str, aliases: Sequence[str]) -> None:
    """Insert the policy and its version 0 if missing; an existing policy gets these aliases.

    Raises:
        SetupError: the policy exists with another base model, which its adapters require.
        StoreUnavailable
    """

    async def ensure(connection: AsyncConnection) -> None:
        new = insert(PolicyRow).values(
            id=policy,
            base_model=base_model,
            aliases=list(aliases),
            sampling=exact_json(DEFAULT_SAMPLING),
            head=0,
            active=0,
        )
        upsert = new.on_conflict_do_update(index_elements=[PolicyRow.id], set_={"aliases": new.excluded.aliases})
        stored = await connection.scalar(upsert.returning(PolicyRow.base_model))
        if stored != base_model:
            raise SetupError(
                f"policy {policy!r} was made for {stored}, not {base_model}: serve that model, or use another data"
                " folder"
            )
        await connection.execute(insert(VersionRow).values(policy=policy, n=0).on_conflict_do_nothing())

    await database.run(ensure)
