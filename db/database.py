"""Connects to PostgreSQL; every call is one transaction with a time limit."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import psycopg
from psycopg.pq import ExecStatus
from psycopg.rows import TupleRow
from sqlalchemy import event, make_url
from sqlalchemy.engine import Engine
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidatePoolError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from clawloop.core.errors import (
    ClawloopError,
    RecordUnusable,
    SetupError,
    StoreContended,
    StoreTimedOut,
    StoreUnavailable,
)
from db.content import PLAIN, ContentCodec, put_content
from db.encryption.installation import require_keys

# Dead connections -----------------------------------------------------------------------------------------------------
# Finds connections that a restarted PostgreSQL or a lost network has left in the pool, before a transaction gets one.
#
# SQLAlchemy's own check asks the server each time, which is a quarter of what a lone insert costs. Here the server is
# asked only where there is doubt: its end of the connection said something although nothing was asked (as it does when
# it ends), or the connection lay in the pool for a while (as behind a network that is gone).

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


# Transactions ---------------------------------------------------------------------------------------------------------
# Connects to PostgreSQL; every call is one transaction with a time limit.
#
# Database errors become `StoreUnavailable` if a retry can help and `RecordUnusable` if the values can never be stored;
# any other error is a bug and propagates unchanged.

Raw: TypeAlias = psycopg.AsyncConnection[TupleRow]
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")

CHAT_LIMIT = timedelta(milliseconds=500)
"""Longest wait of requests that a client waits for; after it the turn goes to the spool."""

BACKGROUND_LIMIT = timedelta(seconds=30)
"""Longest wait of work that no client waits for: spool, command line, sweeps."""

_POOL_SIZE = 8  # a turn holds a connection for about 10 ms
_POOL_OVERFLOW = 8  # a gateway opened 33 of its three pools' 48 under load; see `max_connections` of our PostgreSQL
# The server keeps a transaction this much longer than its client waits for it: what is being committed may end, and a
# client that lost its network in the middle keeps no lock that others wait for.
_SERVER_WAITS = timedelta(seconds=1.5)
_CLOSE_SECONDS = 1.0  # a gateway has 4 s to stop, and an unresponsive server uses up all of them

# Subclasses of OperationalError, but a retry does not make a value smaller.
_TOO_BIG = psycopg.errors.ProgramLimitExceeded | psycopg.errors.StatementTooComplex
# During a rollout of a new version turns must wait, not fail.
_OTHER_SCHEMA = psycopg.errors.UndefinedTable | psycopg.errors.UndefinedColumn
# Subclasses of OperationalError.
_CONTENDED = psycopg.errors.LockNotAvailable | psycopg.errors.DeadlockDetected
# Caused by the server's state or its administration: damage, a read-only standby, a session ended for idling, missing
# rights or schema, a cached plan from before a migration (FeatureNotSupported).
_TRANSIENT = (
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
        url: `postgresql://user:password@host:port/name`, as for psql.
        limit: longest wait for a whole transaction, connecting included. The server's statement timeout is a little
            shorter, so that the server does not continue work whose caller has given up.
        content: how conversations are stored.
    """

    def __init__(self, url: str, limit: timedelta = CHAT_LIMIT, content: ContentCodec = PLAIN) -> None:
        self.content = content
        self._limit_seconds = limit.total_seconds()
        statement_milliseconds = int(self._limit_seconds * 900)
        transaction_milliseconds = int((limit + _SERVER_WAITS).total_seconds() * 1000)
        address = make_url(driver_url(url))
        self._engine = create_async_engine(
            address,
            pool_size=_POOL_SIZE,
            max_overflow=_POOL_OVERFLOW,
            pool_timeout=self._limit_seconds,
            hide_parameters=True,  # parameters are conversations, and errors are logged
            connect_args={
                "application_name": "clawloop",
                "options": f"{address.query.get('options', '')} -c timezone=UTC"
                f" -c statement_timeout={statement_milliseconds}"
                # A gateway that hangs or lost its network must not keep the lock on a session's row.
                f" -c idle_in_transaction_session_timeout={transaction_milliseconds}",
            },
        )
        limit_transactions = partial(_limit_transactions, milliseconds=transaction_milliseconds)
        event.listen(self._engine.sync_engine, "connect", limit_transactions)
        # After a restart of PostgreSQL the first turn must not fail on a dead connection.
        check_connections(self._engine.sync_engine)
        event.listen(self._engine.sync_engine, "connect", lambda _, record: put_content(record.info, content))
        self._keys_compared = False
        self._abandoned: set[asyncio.Task[Any]] = set()

    async def run(self, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        """The result of `work`, after its transaction was committed.

        Raises:
            StoreUnavailable: no answer in time, or none at all. The transaction may still have been committed.
            RecordUnusable: PostgreSQL can never store these values.
            SetupError: the database is encrypted with other keys.
        """
        return await self._within_limit(self._transaction(work))

    async def compare_keys(self) -> None:
        """Compare the keys with the database, as each database's first transaction does.

        Raises:
            SetupError: the database is encrypted with other keys.
            StoreUnavailable
        """
        await self.run(_nothing)

    async def _transaction(self, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        try:
            if not self._keys_compared:
                async with self._engine.begin() as connection:
                    self._keys_compared = await require_keys(connection, self.content)
            async with self._engine.begin() as connection:
                return await work(connection)
        except (DBAPIError, psycopg.Error) as error:
            if (translated := _translate(error)) is None:
                raise
            raise translated from None  # the cause quotes rows
        except (PoolTimeoutError, OSError) as error:
            raise StoreUnavailable(_one_line(error)) from error

    async def _within_limit(self, work: Coroutine[Any, Any, Result]) -> Result:
        # Not asyncio.timeout: on cancellation psycopg asks the server to cancel too, which takes up to 10 s if the
        # server does not respond. So the caller returns at once and the cancelled task ends in the background.
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
        task.add_done_callback(self._discard)
        task.cancel()

    def _discard(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it as never retrieved

    async def close(self) -> None:
        """Close all connections, after giving abandoned transactions a moment to end."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=_CLOSE_SECONDS)
        await self._engine.dispose()


class PostgresStore:
    """A store whose methods are transactions of one database."""

    def __init__(self, database: Database) -> None:
        self._database = database


Store = TypeVar("Store", bound=PostgresStore)


def transaction(
    method: Callable[Concatenate[Store, AsyncConnection, Arguments], Awaitable[Result]],
) -> Callable[Concatenate[Store, Arguments], Coroutine[Any, Any, Result]]:
    """Makes a store's method one transaction of `self._database`, whose connection is the method's first argument.

    Raises:
        StoreUnavailable, RecordUnusable: as `Database.run`.
    """

    @wraps(method)
    async def run(store: Store, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        def work(connection: AsyncConnection) -> Awaitable[Result]:
            return method(store, connection, *arguments, **named)

        return await store._database.run(work)

    return run


async def raw_connection(connection: AsyncConnection) -> Raw:
    """The driver's own connection, in the same transaction."""
    raw = (await connection.get_raw_connection()).driver_connection
    assert isinstance(raw, psycopg.AsyncConnection)
    return raw


async def _nothing(_: AsyncConnection) -> None:
    return None


def _limit_transactions(connection: Any, record: object, *, milliseconds: int) -> None:
    """Limit transactions where PostgreSQL can, from version 17 on.

    To the time-outs above a pipeline that never ends is neither a statement nor idle: a client that lost its network
    in the middle of one would keep its locks until TCP gives up, after hours.
    """
    if connection.driver_connection.info.server_version < 170_000:
        return
    cursor = connection.cursor()
    cursor.execute(f"SET transaction_timeout = {milliseconds}")
    cursor.close()
    connection.commit()


def driver_url(url: str) -> str:
    """The address with the driver psycopg.

    Raises:
        SetupError: the URL is not a PostgreSQL address.
    """
    invalid = SetupError(
        "DATABASE_URL is not a valid address: postgresql://user:password@host:port/name"
        " (in user and password write %40 for @, %2F for / and %3A for :)"
    )
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: the port is not a number
        raise invalid from None
    if "@" in (parsed.host or ""):  # the rest of a password, which a failed lookup of the host would print
        raise invalid
    if parsed.get_backend_name() not in {"postgresql", "postgres"}:
        raise SetupError("DATABASE_URL must begin with postgresql://")
    return parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def postgres_message(error: DBAPIError | psycopg.Error) -> str:
    """The message of PostgreSQL or the driver, on one line.

    Never DETAIL, HINT or CONTEXT, which quote rows, i.e. conversations.
    """
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
        message = " ".join(cause.diag.message_primary.split())
        # `invalid input syntax for type uuid: "…"`
        return message.partition(': "')[0] if isinstance(cause, psycopg.DataError) else message
    return _one_line(cause or error)  # an error of the driver, or of connecting


def _translate(error: DBAPIError | psycopg.Error) -> ClawloopError | None:
    """The Clawloop error for a database error; None for a bug."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, _TOO_BIG | psycopg.DataError | psycopg.IntegrityError):
        return RecordUnusable(postgres_message(error))
    if isinstance(cause, _OTHER_SCHEMA):
        return StoreUnavailable(f"the database has another schema (clawloop migrate): {postgres_message(error)}")
    if isinstance(cause, _CONTENDED):
        return StoreContended(postgres_message(error))
    if isinstance(cause, psycopg.errors.QueryCanceled):
        return StoreTimedOut(postgres_message(error))
    if isinstance(cause, _TRANSIENT):
        return StoreUnavailable(postgres_message(error))
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
