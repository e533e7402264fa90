"""Migrates a database to this code's schema, and checks whether it has that schema.

A database newer than this code is not current either, so that a roll-back of the program is noticed. Every process
checks, few migrate: Alembic, 8 MB in each, is imported with the first migration.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from runpy import run_path
from typing import TYPE_CHECKING

import psycopg
from sqlalchemy import URL, column, create_engine, func, select, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.errors import SetupError
from db.database import Database, driver_url, postgres_message

if TYPE_CHECKING:
    from alembic.config import Config

LOCK = 0x636C6177  # "claw": advisory lock of a migration
LOCK_SECONDS = 10.0  # longer than a migration takes; a thread that waits for ever would block Ctrl-C
_CONNECT_SECONDS = 10


def migrate(database_url: str) -> None:
    """Upgrade the database to the newest schema; blocking. Concurrent calls are safe.

    Raises:
        SetupError: the database cannot be reached, refuses access, has a revision that this code does not know, or
            another transaction holds a lock for too long.
    """
    from alembic import command

    with _migrating(database_url) as config:
        command.upgrade(config, "head")


def migrate_down(database_url: str, revision: str) -> None:
    """Downgrade the database to a revision, `base` for an empty one. Data that only newer revisions hold is lost.

    Raises:
        SetupError
    """
    from alembic import command

    with _migrating(database_url) as config:
        command.downgrade(config, revision)


@contextmanager
def _migrating(database_url: str) -> Iterator[Config]:
    from alembic.runtime.migration import MigrationContext
    from alembic.util import CommandError

    engine = create_engine(
        driver_url(database_url), connect_args={"connect_timeout": _CONNECT_SECONDS}, hide_parameters=True
    )
    try:
        with engine.begin() as connection:
            connection.execute(select(func.set_config("lock_timeout", f"{LOCK_SECONDS:g}s", True)))
            connection.execute(select(func.pg_advisory_xact_lock(LOCK)))
            _require_known(MigrationContext.configure(connection).get_current_revision())
            config = _config()
            config.attributes["connection"] = connection
            yield config
    except DBAPIError as error:
        raise SetupError(_refusal(error, engine.url)) from None  # the cause may quote rows
    except CommandError as error:
        raise SetupError(f"cannot change the database's schema: {error}") from error
    finally:
        engine.dispose()


def _refusal(error: DBAPIError, address: URL) -> str:
    message = postgres_message(error)
    if isinstance(error.orig, psycopg.errors.InsufficientPrivilege):
        return (
            f"cannot change the database's schema: {message}: as its owner,"
            f" GRANT USAGE, CREATE ON SCHEMA public TO {address.username or 'this user'},"
            " or migrate as the user that owns the tables"
        )
    if isinstance(error.orig, psycopg.errors.LockNotAvailable):
        return (
            f"cannot change the database's schema: another `clawloop migrate` or a long transaction has held a lock"
            f" for {LOCK_SECONDS:g} s: wait for it, or end it (see pg_stat_activity), and try again"
        )
    return f"cannot use the database: {message}"


async def require_known_schema(database: Database) -> None:
    """Refuse a database that this code cannot migrate; one without a schema is left to `migrate`.

    Raises:
        SetupError: the database's revision is one that this code does not know.
        StoreUnavailable
    """
    _require_known(await database.run(_revision))


def _require_known(revision: str | None) -> None:
    if revision is not None and revision not in revisions():
        raise SetupError(
            f"another version of Clawloop made this database's schema (revision {revision}), which this one cannot use:"
            " go on with that version, or have it export what is to be kept (`clawloop export`) and start this one with"
            " a new data folder (--data), or with an empty database and a new Temporal server"
        )


async def is_current(database: Database) -> bool:
    """True if the database has exactly this code's schema.

    Raises:
        StoreUnavailable
    """
    return await database.run(_revision) == revisions()[0]


@cache
def revisions() -> tuple[str, ...]:
    """The migrations of this code, the newest first: their files are numbered."""
    folder = files("migrations").joinpath("versions")
    paths = sorted((str(path) for path in folder.iterdir() if path.name.startswith("v")), reverse=True)
    return tuple(run_path(path)["revision"] for path in paths)


async def _revision(connection: AsyncConnection) -> str | None:
    if await connection.scalar(select(func.to_regclass("alembic_version"))) is None:
        return None
    revision: str | None = await connection.scalar(select(column("version_num")).select_from(table("alembic_version")))
    return revision


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(files("migrations")).replace("%", "%%"))
    return config
