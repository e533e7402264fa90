"""Finds connections that a restarted PostgreSQL or a lost network has left in the pool, before a transaction gets one.

SQLAlchemy's own check asks the server each time, which is a quarter of what a lone insert costs. Here the server is
asked only where there is doubt: its end of the connection said something although nothing was asked (as it does when
it ends), or the connection lay in the pool for a while (as behind a network that is gone).
"""

from __future__ import annotations

import select
import time
from functools import partial
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import InvalidatePoolError

# A network that is gone says nothing. Under load connections are used again within milliseconds.
_IDLE_SECONDS = 1.0
_LAST_USED = "last_used"


def check_connections(engine: Engine) -> None:
    """Check each connection of the engine's pool before it is used again."""
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", partial(_check, engine))


def _note_use(_: object, record: Any) -> None:
    record.info[_LAST_USED] = time.monotonic()


def _check(engine: Engine, connection: Any, record: Any, _: object) -> None:
    """
    Raises:
        InvalidatePoolError: the connection is dead; the pool connects anew.
    """
    last_used: float | None = record.info.get(_LAST_USED)
    if last_used is None:  # it has just been opened
        return
    if time.monotonic() - last_used < _IDLE_SECONDS and not _has_input(connection.driver_connection.pgconn):
        return
    dialect = engine.dialect
    try:
        dialect.do_ping(connection)
    except dialect.loaded_dbapi.Error as error:
        raise InvalidatePoolError from error


def _has_input(pgconn: Any) -> bool:
    """Whether something arrived on a connection that waits for nothing: a notice, or its end."""
    if pgconn.status != 0:  # closed by this side
        return True
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    return bool(poll.poll(0))
