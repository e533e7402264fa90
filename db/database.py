"""Connections to PostgreSQL, with a limit on how long anyone waits for them.

Knows nothing about tables. Every call is one transaction; its errors become ours: what may pass is
`StoreUnavailable`, what is the record's own fault is `RecordUnusable`, anything else is a bug and stays itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import psycopg
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from clawloop.errors import ClawloopError, RecordUnusable, SetupError, StoreUnavailable

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

CHAT_LIMIT = timedelta(milliseconds=500)
"""A client waits for this one; past it the turn goes to the spool."""

BACKGROUND_LIMIT = timedelta(seconds=30)
"""Nobody waits for this one: spool, command line, sweeps."""

_POOL_SIZE = 8  # a turn holds a connection for about 10 ms
_POOL_OVERFLOW = 8  # six gateways fit in the 100 connections PostgreSQL allows by default
_CLOSE_SECONDS = 1.0  # a gateway has 4 s to stop, and a silent server will not answer in any of them

# Subclasses of OperationalError all, but waiting does not make a value smaller.
_TOO_BIG = psycopg.errors.ProgramLimitExceeded | psycopg.errors.StatementTooComplex
# While versions are rolled out turns must wait, not fail.
_OTHER_SCHEMA = psycopg.errors.UndefinedTable | psycopg.errors.UndefinedColumn
# The server's state or its administrator's work, not ours: damage, a standby that takes no writes, a session ended
# for idling, rights or a schema not (yet) given, a plan kept from before a migration (FeatureNotSupported).
_MAY_PASS = (
    psycopg.OperationalError
    | psycopg.InterfaceError
    | psycopg.InternalError
    | psycopg.errors.InsufficientPrivilege
    | psycopg.errors.InvalidSchemaName
    | psycopg.errors.FeatureNotSupported
)


class Database:
    """A pool of connections that gives each transaction the same time limit.

    Args:
        url: `postgresql://user:password@host:port/name`, as psql takes it.
        limit: the longest a caller waits for a whole transaction, connecting included. The server is told to
            give up on a statement a little earlier, so that it does not work for nobody.
    """

    def __init__(self, url: str, limit: timedelta = CHAT_LIMIT) -> None:
        self._limit_seconds = limit.total_seconds()
        statement_milliseconds = int(self._limit_seconds * 900)
        address = make_url(driver_url(url))
        self._engine = create_async_engine(
            address,
            pool_size=_POOL_SIZE,
            max_overflow=_POOL_OVERFLOW,
            pool_timeout=self._limit_seconds,
            hide_parameters=True,  # they are conversations, and errors are logged
            pool_pre_ping=True,  # after a restart of PostgreSQL the first turn must not fail on a dead connection
            connect_args={
                "application_name": "clawloop",
                "options": f"{address.query.get('options', '')} -c timezone=UTC"
                f" -c statement_timeout={statement_milliseconds}"
                # A gateway that hangs or was cut off must not keep a session's row from the others.
                f" -c idle_in_transaction_session_timeout={statement_milliseconds * 4}",
            },
        )
        self._abandoned: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        """What `work` returns, after its transaction was committed.

        Raises:
            StoreUnavailable: no answer in time, or none at all. It may still have been committed.
            RecordUnusable: PostgreSQL will never take these values.
        """
        return await self._within_limit(self._transaction(work))

    async def _transaction(self, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        try:
            async with self._engine.begin() as connection:
                return await work(connection)
        except DBAPIError as error:
            if (ours := _as_our_error(error)) is None:
                raise
            raise ours from None  # the cause quotes rows
        except (PoolTimeoutError, OSError) as error:
            raise StoreUnavailable(_one_line(error)) from error

    async def _within_limit(self, work: Coroutine[Any, Any, Result]) -> Result:
        # Not asyncio.timeout: cancelling makes psycopg ask a silent server to cancel too, for up to 10 s more.
        # The caller is let go at once; the cancelled task ends on its own.
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=self._limit_seconds)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not done:
            self._abandon(task)
            raise StoreUnavailable(f"PostgreSQL did not answer within {self._limit_seconds:g} s")
        return task.result()

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.add(task)
        task.add_done_callback(self._forget)
        task.cancel()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # read, so that asyncio does not report what nobody waits for

    async def close(self) -> None:
        """Close all connections; what was given up on gets a moment to end first."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=_CLOSE_SECONDS)
        await self._engine.dispose()


class _UsesDatabase(Protocol):
    _database: Database


Store = TypeVar("Store", bound=_UsesDatabase)


def transaction(
    method: Callable[Concatenate[Store, AsyncConnection, Arguments], Awaitable[Result]],
) -> Callable[Concatenate[Store, Arguments], Coroutine[Any, Any, Result]]:
    """Makes a store's method one transaction of `self._database`; the method gets the connection as first argument.

    Raises:
        StoreUnavailable, RecordUnusable: as `Database.run`.
    """

    @wraps(method)
    async def run(store: Store, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        def work(connection: AsyncConnection) -> Awaitable[Result]:
            return method(store, connection, *arguments, **named)

        return await store._database.run(work)

    return run


def driver_url(url: str) -> str:
    """The same address with the driver we use.

    Raises:
        SetupError: this is no PostgreSQL address.
    """
    no_address = SetupError(
        "DATABASE_URL is no address: postgresql://user:password@host:port/name"
        " (in user and password write %40 for @, %2F for / and %3A for :)"
    )
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: the port is no number
        raise no_address from None
    if "@" in (parsed.host or ""):  # the rest of a password; whoever looks the host up would print it
        raise no_address
    if parsed.get_backend_name() not in {"postgresql", "postgres"}:
        raise SetupError("DATABASE_URL must begin with postgresql://")
    return parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def postgres_message(error: DBAPIError | psycopg.Error) -> str:
    """What PostgreSQL or the driver says is wrong, on one line.

    Never DETAIL, HINT or CONTEXT, which quote rows: a row of ours is somebody's conversation.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
        return " ".join(cause.diag.message_primary.split())
    return _one_line(cause or error)  # of the driver itself, or of a connection that was never made


def _as_our_error(error: DBAPIError) -> ClawloopError | None:
    """Ours for an error of the database; None for a bug, which must stay visible."""
    cause = error.orig
    if isinstance(cause, _TOO_BIG | psycopg.DataError | psycopg.IntegrityError):
        return RecordUnusable(postgres_message(error))
    if isinstance(cause, _OTHER_SCHEMA):
        return StoreUnavailable(f"the database has another schema (clawloop migrate): {postgres_message(error)}")
    if isinstance(cause, _MAY_PASS):
        return StoreUnavailable(postgres_message(error))
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
