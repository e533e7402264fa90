"""The directory of policies and engines that gateways route by, and the listener for its changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import psycopg
from pydantic import JsonValue
from sqlalchemy import func, make_url, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.serving import Directory, Policy
from clawloop.core.errors import SetupError
from db.content import exact_json
from db.database import Database, PostgresStore, driver_url, postgres_message, transaction
from db.lessons.ledger import read_policy_lessons
from db.serving.engines import read_engines
from db.tables import PolicyRow, VersionRow
from db.training.policies import CHANNEL

# The directory --------------------------------------------------------------------------------------------------------
# Stores policies, and reads the directory that the gateway routes by.

DEFAULT_SAMPLING: dict[str, JsonValue] = {
    "temperature": 0.6,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Sampling of a client that sets nothing; a turn sampled with it can be trained."""


class PostgresDirectoryStore(PostgresStore):
    @transaction
    async def read(self, connection: AsyncConnection) -> Directory:
        files = select(VersionRow.policy, func.array_agg(VersionRow.n).label("versions")).where(
            VersionRow.path.is_not(None), VersionRow.removed_at.is_(None)
        )
        rows = await connection.execute(files.group_by(VersionRow.policy))
        kept = {row.policy: frozenset[int](row.versions) for row in rows}
        lessons = await read_policy_lessons(connection)
        policies = [
            Policy(
                id=row.id,
                base_model=row.base_model,
                aliases=tuple(row.aliases),
                active=row.active,
                sampling=row.sampling,
                canary=None if row.pinned is not None else row.canary,
                canary_share=row.canary_share or 0.0,
                kept=kept.get(row.id, frozenset()),
                lessons=lessons.get(row.id),
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


# The listener ---------------------------------------------------------------------------------------------------------
# Listens for directory changes, on a PostgreSQL connection of its own.
#
# Notifications are lost while the connection is down, so that reconnecting counts as a change.

log = logging.getLogger(__name__)

# The directory is also read every second.
RECONNECT_SECONDS = 1.0
# A connection cut by the network raises nothing; after this long without a notification it gets a query.
SILENCE_SECONDS = 10.0
CONNECT_SECONDS = 5


class PostgresListener:
    def __init__(self, url: str) -> None:
        self._address = make_url(driver_url(url)).set(drivername="postgresql").render_as_string(hide_password=False)

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields at once, at each change, and after each reconnection; never ends by itself."""
        logged = False
        while True:
            try:
                connection = await self._connect()
                async with connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    logged = False
                    yield  # what changed before this connection listened
                    while True:
                        async with aclosing(connection.notifies(timeout=SILENCE_SECONDS, stop_after=1)) as changes:
                            async for _ in changes:
                                yield
                        await connection.execute("SELECT")
            except (psycopg.Error, OSError) as error:
                if not logged:
                    why = postgres_message(error) if isinstance(error, psycopg.Error) else str(error)
                    log.warning(
                        "not listening for directory changes; reading the directory every second", extra={"why": why}
                    )
                    logged = True
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _connect(self) -> psycopg.AsyncConnection:
        return await psycopg.AsyncConnection.connect(
            self._address,
            autocommit=True,
            connect_timeout=CONNECT_SECONDS,
            application_name="clawloop notices",
            tcp_user_timeout=10_000,  # milliseconds, so that the query above fails on a dead network
        )
