"""Listens for directory changes, on a PostgreSQL connection of its own.

Notifications are lost while the connection is down, so that reconnecting counts as a change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import psycopg
from sqlalchemy import make_url

from db.database import driver_url, postgres_message
from db.serving.activation import CHANNEL

log = logging.getLogger(__name__)

# The directory is also read every second.
RECONNECT_SECONDS = 1.0
# A connection cut by the network raises nothing; after this long without a notification it gets a query.
SILENCE_SECONDS = 10.0
CONNECT_SECONDS = 5


class PostgresListener:
    """Implements `clawloop.serving.directory.DirectoryChanges`."""

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
