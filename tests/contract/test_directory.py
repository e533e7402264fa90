"""Policies and engines as the gateway reads them."""

from __future__ import annotations

import psycopg
import pytest

from clawloop.core.contracts.serving import Directory, Engine, Policy
from clawloop.core.errors import SetupError
from db.database import Database
from db.serving.directory import DEFAULT_SAMPLING, PostgresDirectoryStore, ensure_policy
from db.serving.engines import (
    add_engine,
    add_missing_engines,
    drain_engine,
    ensure_engines,
    list_engines,
    remove_engine,
)
from tests.conftest import execute
from tests.contract.conftest import Stores

DEFAULT = Policy("default", "tiny", ("qwen3-4b",), 0, DEFAULT_SAMPLING)


async def test_a_new_directory_has_the_base_model_and_no_engine(stores: Stores) -> None:
    assert await stores.directory.read() == Directory((DEFAULT,), ())


async def test_ensuring_a_policy_again_keeps_its_versions(database: Database, postgres_url: str) -> None:
    execute(postgres_url, "INSERT INTO versions (policy, n, parent, path) VALUES ('default', 7, 0, 'v7')")
    execute(postgres_url, "UPDATE policies SET head = 7, active = 7")

    await ensure_policy(database, "default", "tiny", ["another", "name"])

    (policy,) = (await PostgresDirectoryStore(database).read()).policies
    assert policy == Policy("default", "tiny", ("another", "name"), 7, DEFAULT_SAMPLING)
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT n FROM versions ORDER BY n").fetchall() == [(0,), (7,)]


async def test_a_policy_never_changes_its_base_model(database: Database) -> None:
    with pytest.raises(SetupError, match="made for tiny, not big"):
        await ensure_policy(database, "default", "big", [])

    assert (await PostgresDirectoryStore(database).read()).policies == (DEFAULT,)


async def test_the_engines_of_one_installation_are_exactly_those_given(database: Database, postgres_url: str) -> None:
    await ensure_engines(database, ["http://127.0.0.1:8100/", "http://gpu:8100"], "here")
    execute(postgres_url, "INSERT INTO engine_versions VALUES ('gpu:8100', 'default', 0)")
    await drain_engine(database, "gpu:8100")

    kept = await ensure_engines(database, ["http://gpu:8100", "https://gpu:8101"], "here")

    assert kept == [
        Engine("gpu:8100", "http://gpu:8100", {"default": frozenset({0})}, draining=True),
        Engine("gpu:8101", "https://gpu:8101", {}, draining=False),
    ]
    assert (await PostgresDirectoryStore(database).read()).engines == tuple(kept)


async def test_engines_that_others_added_are_left_alone(database: Database) -> None:
    await add_engine(database, "http://by-hand:8100")
    await ensure_engines(database, ["http://there:8100"], "there")
    await ensure_engines(database, ["http://here:8100", "http://by-hand:8100"], "here")

    await ensure_engines(database, ["http://here:8200"], "here")

    assert [engine.id for engine in await list_engines(database)] == ["by-hand:8100", "here:8200", "there:8100"]


async def test_missing_engines_are_added_and_existing_ones_are_unchanged(database: Database) -> None:
    await ensure_engines(database, ["http://gpu:8100"], "here")
    await drain_engine(database, "gpu:8100")

    await add_missing_engines(database, ["http://gpu:8100", "http://gpu:8200"], "here")

    found = await list_engines(database)
    assert [(engine.id, engine.draining) for engine in found] == [("gpu:8100", True), ("gpu:8200", False)]


async def test_engines_are_added_drained_returned_and_removed(database: Database) -> None:
    added = await add_engine(database, "http://gpu:8100")
    assert added == Engine("gpu:8100", "http://gpu:8100", {}, draining=False)

    assert await drain_engine(database, added.id)
    assert [engine.draining for engine in await list_engines(database)] == [True]
    assert await drain_engine(database, added.id, False)
    assert await drain_engine(database, added.id)
    assert await add_engine(database, "http://gpu:8100") == added

    assert await remove_engine(database, added.id)
    assert await list_engines(database) == []
    assert not await drain_engine(database, added.id)
    assert not await remove_engine(database, added.id)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gpu:8100",
        "ftp://gpu",
        "http://",
        "http://user:secret@gpu",
        "http://gpu:x",
        "http://a..b:8000",
        "http://.:8000",
        "http://:8000",
        "http://-gpu",
        "http://g pu",
        "http://g\npu",
        "http://[::1",
        "http://[v1.x]:1",
        "http://300.1.1.1",
        f"http://{64 * 'a'}",
        "http://gpu:8000?key=1",
        "http://gpu:8000#here",
    ],
)
async def test_an_engine_needs_an_http_address(database: Database, url: str) -> None:
    with pytest.raises(SetupError, match="http://host:port") as raised:
        await add_engine(database, url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    ["http://vllm_1:8100", "http://[::1]:8100", "https://gpu.example./engine", "http://10.0.0.1", "http://büro:1"],
)
async def test_an_engine_may_have_any_host(database: Database, url: str) -> None:
    assert (await add_engine(database, url)).url == url
