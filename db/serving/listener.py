"""Word from PostgreSQL that the directory changed, over a connection that does nothing else.

Knows nothing about what changed. Word may be lost while the connection is; then it is told once when it is back.
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

# The directory is read every second anyway.
RECONNECT_SECONDS = 1.0
# A connection cut in between says nothing; after this long without word it is asked for a sign of life.
SILENCE_SECONDS = 10.0
CONNECT_SECONDS = 5


class PostgresListener:
    """Satisfies `api.ports.DirectoryChanges`."""

    def __init__(self, url: str) -> None:
        self._address = make_url(driver_url(url)).set(drivername="postgresql").render_as_string(hide_password=False)

    async def changes(self) -> AsyncGenerator[None, None]:
        """Something at once, at each change, and after each time in which word could be lost; never ends by itself."""
        told = False
        while True:
            try:
                connection = await self._connect()
                async with connection:
                    await connection.execute(f"LISTEN {CHANNEL}")
                    told = False
                    yield  # what changed before this connection listened
                    while True:
                        async with aclosing(connection.notifies(timeout=SILENCE_SECONDS, stop_after=1)) as notices:
                            async for _ in notices:
                                yield
                        await connection.execute("SELECT")
            except (psycopg.Error, OSError) as error:
                if not told:
                    why = postgres_message(error) if isinstance(error, psycopg.Error) else str(error)
                    log.warning("no word of changes; looking every second", extra={"why": why})
                    told = True
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _connect(self) -> psycopg.AsyncConnection:
        return await psycopg.AsyncConnection.connect(
            self._address,
            autocommit=True,
            connect_timeout=CONNECT_SECONDS,
            application_name="clawloop notices",
            tcp_user_timeout=10_000,  # milliseconds; a network that is gone is noticed with the sign of life
        )
