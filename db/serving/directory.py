"""Policies in PostgreSQL, and the directory the gateway routes by."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import JsonValue
from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.serving import Directory, Policy
from clawloop.errors import SetupError
from db.database import Database
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
"""What a client that sets nothing gets (DESIGN 5.1); a turn sampled so can be trained."""


class PostgresDirectoryStore:
    """Satisfies `api.ports.DirectoryStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self) -> Directory:
        """Policies and engines as they are now.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(_read)


async def ensure_policy(database: Database, policy: str, base_model: str, aliases: Sequence[str]) -> None:
    """Make the policy and its version 0 if there is none; an existing one gets these aliases.

    Raises:
        SetupError: it exists with another base model, whose adapters would fit nothing here.
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
        known = new.on_conflict_do_update(index_elements=[PolicyRow.id], set_={"aliases": new.excluded.aliases})
        stands_for = await connection.scalar(known.returning(PolicyRow.base_model))
        if stands_for != base_model:
            raise SetupError(
                f"policy {policy!r} was made for {stands_for}, not {base_model}: serve that one, or use other data"
            )
        await connection.execute(insert(VersionRow).values(policy=policy, n=0).on_conflict_do_nothing())

    await database.run(ensure)


async def _read(connection: AsyncConnection) -> Directory:
    policies = [
        Policy(
            id=row.id,
            base_model=row.base_model,
            aliases=tuple(row.aliases),
            active=row.active,
            sampling=row.sampling,
        )
        for row in await connection.execute(select(PolicyRow).order_by(PolicyRow.id))
    ]
    return Directory(tuple(policies), tuple(await read_engines(connection)))
