"""Upgrades and downgrades of the schema, and databases with another schema."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

from clawloop.errors import SetupError
from clawloop.local.services.postgres import free_port
from db import schema
from db.database import Database, driver_url
from db.schema import head, is_current, migrate, migrate_down
from db.tables import Base
from tests.conftest import execute
from tests.contract.conftest import TEST_LIMIT

pytestmark = pytest.mark.postgres


def tables(url: str) -> set[str]:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        return {name for (name,) in found} - {"alembic_version"}


async def current(url: str) -> bool:
    database = Database(url, TEST_LIMIT)
    try:
        return await is_current(database)
    finally:
        await database.close()


def test_downgrades_undo_upgrades(empty_postgres_url: str) -> None:
    assert tables(empty_postgres_url) == set()
    migrate(empty_postgres_url)
    assert tables(empty_postgres_url) == set(Base.metadata.tables)
    migrate_down(empty_postgres_url, "base")
    assert tables(empty_postgres_url) == set()
    migrate(empty_postgres_url)
    migrate(empty_postgres_url)  # nothing to do
    assert tables(empty_postgres_url) == set(Base.metadata.tables)


def test_an_open_steps_attempts_before_an_upgrade_are_not_counted_as_unheard_of(empty_postgres_url: str) -> None:
    """Otherwise an open step that was tried often would be given up at its first attempt after the upgrade."""
    migrate(empty_postgres_url)
    for statement in (
        "INSERT INTO policies (id, base_model, aliases, sampling, head, active) VALUES ('p', 'm', '{}', '{}', 0, 0)",
        "INSERT INTO versions (policy, n) VALUES ('p', 0)",
        "INSERT INTO recipes (hash, name, signal_hash, train_hash, content) VALUES ('h', 'r', 's', 't', '{}')",
        """INSERT INTO steps (policy, n, parent, epoch, recipe_hash, state, attempt, finished_at)
            VALUES ('p', 1, 0, 0, 'h', 'committed', 12, now()), ('p', 2, 0, 0, 'h', 'claimed', 12, NULL)""",
    ):
        execute(empty_postgres_url, statement)
    migrate_down(empty_postgres_url, "0011")
    migrate(empty_postgres_url)
    with psycopg.connect(empty_postgres_url) as connection:
        found = connection.execute("SELECT n, attempt, failed, interrupted FROM steps ORDER BY n").fetchall()
    assert found == [(1, 12, 0, 0), (2, 12, 0, 12)]


def test_the_migrated_schema_is_the_one_the_code_describes(postgres_url: str) -> None:
    engine = create_engine(driver_url(postgres_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_every_check_of_the_code_is_in_the_migrated_schema(postgres_url: str, empty_postgres_url: str) -> None:
    """Alembic compares no CHECK constraints, so PostgreSQL's own words for them are compared."""
    engine = create_engine(driver_url(empty_postgres_url))
    Base.metadata.create_all(engine)
    engine.dispose()

    assert _checks(empty_postgres_url) == _checks(postgres_url)
    assert len(_checks(postgres_url)) > 8


def test_concurrent_migrations_are_safe(empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_SECONDS", 200.0)  # the last one waits for three, on a busy machine

    async def all_at_once() -> None:
        await asyncio.gather(*(asyncio.to_thread(migrate, empty_postgres_url) for _ in range(4)))

    asyncio.run(all_at_once())

    assert tables(empty_postgres_url) == set(Base.metadata.tables)


def test_migrating_works_from_any_working_directory(
    empty_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    migrate(empty_postgres_url)
    assert tables(empty_postgres_url)


async def test_a_schema_is_current_only_at_this_codes_revision(empty_postgres_url: str) -> None:
    assert head() is not None
    assert not await current(empty_postgres_url)

    await asyncio.to_thread(migrate, empty_postgres_url)
    assert await current(empty_postgres_url)

    execute(empty_postgres_url, "UPDATE alembic_version SET version_num = '9999'")
    assert not await current(empty_postgres_url)
    with pytest.raises(SetupError, match="9999"):
        await asyncio.to_thread(migrate, empty_postgres_url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"postgresql://a:secret@127.0.0.1:{free_port()}/b", "cannot use the database: connection failed"),
        ("mysql://a:secret@127.0.0.1/b", "must begin with postgresql://"),
        ("nonsense:secret", "not a valid address"),
        ("postgresql://a:secret@127.0.0.1:port/b", "not a valid address"),
        ("postgresql://a:top@secret@127.0.0.1/b", "not a valid address"),
    ],
)
def test_an_unusable_address_is_a_one_line_error(url: str, message: str) -> None:
    with pytest.raises(SetupError, match=message) as raised:
        migrate(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_user_without_rights_gets_the_grant_to_run(empty_postgres_url: str) -> None:
    execute(empty_postgres_url, "DROP ROLE IF EXISTS guest")
    execute(empty_postgres_url, "CREATE ROLE guest LOGIN PASSWORD 'guest'")
    parts = urlsplit(empty_postgres_url)
    as_guest = parts._replace(netloc=f"guest:guest@{parts.hostname}:{parts.port}").geturl()

    with pytest.raises(SetupError, match=r"permission denied.*GRANT USAGE, CREATE ON SCHEMA public TO guest") as raised:
        migrate(as_guest)

    assert "\n" not in str(raised.value)
    execute(empty_postgres_url, "DROP ROLE guest")


def test_a_lock_held_too_long_ends_the_migration(empty_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_SECONDS", 0.2)
    with psycopg.connect(empty_postgres_url) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [schema.LOCK])
        with pytest.raises(SetupError, match="another `clawloop migrate`"):
            migrate(empty_postgres_url)


def _checks(url: str) -> set[tuple[str, str]]:
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c'")
        return {(name, definition) for name, definition in found if not name.startswith("pg_")}
