"""Upgrades and downgrades of the schema, and databases with another schema."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine

import migrations
from clawloop.app.local.services.postgres import free_port
from clawloop.app.processes.database import ready_database
from clawloop.core.errors import SetupError
from clawloop.core.settings import read_settings
from db import schema
from db.database import Database, driver_url
from db.schema import is_current, migrate, migrate_down, revisions
from db.tables import Base
from tests.conftest import execute
from tests.contract.conftest import TEST_LIMIT
from tests.verbs import clawloop, clawloop_process, refusal


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
    with psycopg.connect(empty_postgres_url) as connection:
        functions = "SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        assert connection.execute(functions).fetchall() == []
    migrate(empty_postgres_url)
    migrate(empty_postgres_url)  # nothing to do
    assert tables(empty_postgres_url) == set(Base.metadata.tables)


SECOND = """
from alembic import op

revision = "0002"
down_revision = {first!r}
branch_labels = None
depends_on = None


def upgrade():
    op.execute("ALTER TABLE engines ADD COLUMN region text NOT NULL DEFAULT 'here'")


def downgrade():
    op.execute("ALTER TABLE engines DROP COLUMN region")
"""


@contextmanager
def next_release(folder: Path) -> Iterator[None]:
    """While this is entered, the code has one more migration."""
    shutil.copytree(Path(migrations.__file__).parent, folder / "migrations", dirs_exist_ok=True)
    second = folder / "migrations" / "versions" / "v0002_regions.py"
    second.write_text(SECOND.format(first=revisions()[0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "files", lambda name: folder / name)
        revisions.cache_clear()
        yield
    revisions.cache_clear()


async def test_a_second_migration_changes_a_database_with_rows_and_has_a_way_back(
    empty_postgres_url: str, tmp_path: Path
) -> None:
    def engines() -> list[tuple[object, ...]]:
        with psycopg.connect(empty_postgres_url) as connection:
            return connection.execute("SELECT * FROM engines").fetchall()

    await asyncio.to_thread(migrate, empty_postgres_url)
    execute(empty_postgres_url, "INSERT INTO engines (id, url) VALUES ('a', 'http://a')")
    (before,) = engines()
    with next_release(tmp_path):
        assert not await current(empty_postgres_url)
        await asyncio.to_thread(migrate, empty_postgres_url)
        assert await current(empty_postgres_url)
        assert engines() == [(*before, "here")]
    assert not await current(empty_postgres_url)
    with pytest.raises(SetupError, match=r"\(revision 0002\)"):
        await asyncio.to_thread(migrate, empty_postgres_url)
    with next_release(tmp_path):
        await asyncio.to_thread(migrate_down, empty_postgres_url, "-1")
    assert await current(empty_postgres_url)
    assert engines() == [before]


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
    assert not await current(empty_postgres_url)

    await asyncio.to_thread(migrate, empty_postgres_url)
    assert await current(empty_postgres_url)

    execute(empty_postgres_url, "UPDATE alembic_version SET version_num = '0029'")
    assert not await current(empty_postgres_url)


@pytest.fixture
def foreign_url(empty_postgres_url: str) -> str:
    """A database that another version migrated."""
    migrate(empty_postgres_url)
    execute(empty_postgres_url, "UPDATE alembic_version SET version_num = '0029'")
    return empty_postgres_url


FOREIGN = r"made this database's schema \(revision 0029\).* start this one with a new data folder \(--data\)"


def test_migrate_and_a_gateway_refuse_a_database_of_another_version_in_one_line(
    foreign_url: str, tmp_path: Path
) -> None:
    here = {"DATABASE_URL": foreign_url, "CLAWLOOP_DATA": str(tmp_path)}
    assert re.search(FOREIGN, refusal(clawloop("migrate", **here)))
    assert re.search(FOREIGN, refusal(clawloop_process("gateway", "--port", "0", **here)))


async def test_workers_refuse_a_database_of_another_version(foreign_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", foreign_url)
    async with AsyncExitStack() as stack:
        with pytest.raises(SetupError, match=FOREIGN):
            await ready_database(read_settings(), stack)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (f"postgresql://a:secret@127.0.0.1:{free_port()}/b", "cannot use the database: connection failed"),
        ("mysql://a:secret@127.0.0.1/b", "must begin with postgresql://"),
        ("nonsense:secret", "not a valid address"),
        ("postgresql://a:secret@127.0.0.1:port/b", "not a valid address"),
        ("postgresql://a:top@secret@127.0.0.1/b", "not a valid address"),
    ],
    ids=["nobody listens", "another database", "no address", "no port", "two at signs"],
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
