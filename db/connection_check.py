"""Finds connections that a restarted PostgreSQL or a lost network has left in the pool, before a transaction gets one.

SQLAlchemy's own check asks the server each time, which is a quarter of what a lone insert costs. Here the server is
asked only where there is doubt: its end of the connection said something although nothing was asked (as it does when
it ends), or the connection lay in the pool for a while (as behind a network that is gone).
"""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any

import psycopg
from psycopg.pq import ExecStatus
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import InvalidatePoolError

# A network that is gone says nothing. Under load connections are used again within milliseconds.
_IDLE_SECONDS = 1.0
# A living server answers in less than a millisecond, and on a machine with too much work in a second or two. What is
# taken for dead too early costs a new connection in place of each one of the pool.
# Chats have half a second for all: they give up first, which costs one connection. An answer time below that would
# replace the whole pool whenever a gateway or the server stands still for a moment, as when many replies end together.
_ANSWER_SECONDS = 5.0
_LAST_USED = "last_used"


def check_connections(engine: Engine) -> None:
    """Check each connection of the engine's pool before it is used again."""
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", _check)


def _note_use(_: object, record: Any) -> None:
    record.info[_LAST_USED] = time.monotonic()


def _check(connection: Any, record: Any, _: object) -> None:
    """
    Raises:
        InvalidatePoolError: the connection is dead; the pool closes all that it has, and connects anew.
    """
    last_used: float | None = record.info.get(_LAST_USED)
    if last_used is None:  # it has just been opened
        return
    if time.monotonic() - last_used < _IDLE_SECONDS and not _has_input(connection.driver_connection.pgconn):
        return
    try:
        connection.run_async(ask)
    except (psycopg.Error, TimeoutError) as error:
        raise InvalidatePoolError from error


async def ask(connection: psycopg.AsyncConnection[Any]) -> None:
    """Wait for the server's answer to an empty statement.

    Not by psycopg's `execute`: when that is cancelled, psycopg asks the server to cancel the statement, and waits up to
    10 s for a server that is gone.

    Raises:
        TimeoutError: no answer in time.
        psycopg.Error: the connection was ended.
    """
    server = connection.pgconn
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    socket = server.socket  # once the connection was ended, the number is no longer known
    server.send_query(b"")
    loop.add_reader(socket, readable.set)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            while True:
                while server.is_busy():
                    await readable.wait()
                    readable.clear()
                    server.consume_input()
                answer = server.get_result()
                if answer is None:
                    return
                if answer.status != ExecStatus.EMPTY_QUERY:
                    raise psycopg.OperationalError("the server ended the connection")
    finally:
        loop.remove_reader(socket)


def _has_input(pgconn: Any) -> bool:
    """True if a notice or the end of the connection arrived on an idle connection."""
    if pgconn.status != 0:  # closed by this side
        return True
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))
