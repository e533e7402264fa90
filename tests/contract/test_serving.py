"""What gateways read: the directory, keys, activations."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from clawloop.core.contracts.answers import StoredKey
from clawloop.core.contracts.serving import ANY_POLICY, Directory, Engine, KeyLimits, Policy, Scope
from clawloop.core.errors import SetupError
from clawloop.serving.directory import DirectoryCache
from db.database import Database
from db.serving.directory import DEFAULT_SAMPLING, PostgresDirectoryStore, PostgresListener, ensure_policy
from db.serving.engines import (
    add_engine,
    add_missing_engines,
    drain_engine,
    ensure_engines,
    list_engines,
    remove_engine,
)
from db.serving.keys import PostgresKeyStore
from db.serving.publishing import PostgresPublishingStore
from tests.conftest import execute
from tests.contract.conftest import Stores

# Policies and engines as the gateway reads them.

DEFAULT = Policy("default", "tiny", ("qwen3-4b",), 0, DEFAULT_SAMPLING)


async def test_a_new_directory_has_the_base_model_and_no_engine(stores: Stores) -> None:
    assert await stores.directory.read() == Directory((DEFAULT,), ())


async def test_ensuring_a_policy_again_keeps_its_versions(database: Database, postgres_url: str) -> None:
    execute(postgres_url, "INSERT INTO versions (policy, n, parent, path) VALUES ('default', 7, 0, 'v7')")
    execute(postgres_url, "UPDATE policies SET head = 7, active = 7")

    await ensure_policy(database, "default", "tiny", ["another", "name"])

    (policy,) = (await PostgresDirectoryStore(database).read()).policies
    assert policy == Policy("default", "tiny", ("another", "name"), 7, DEFAULT_SAMPLING, kept=frozenset({7}))
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT n FROM versions ORDER BY n").fetchall() == [(0,), (7,)]


async def test_versions_whose_files_were_removed_cannot_be_asked(database: Database, postgres_url: str) -> None:
    for n in (1, 2):
        execute(postgres_url, f"INSERT INTO versions (policy, n, parent, path) VALUES ('default', {n}, 0, 'v{n}')")
    execute(postgres_url, "UPDATE versions SET removed_at = now() WHERE n = 1")
    (policy,) = (await PostgresDirectoryStore(database).read()).policies
    assert policy.kept == frozenset({2})


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


#


async def test_a_key_authenticates_with_its_policy_and_scopes(stores: Stores) -> None:
    key, secret = await stores.keys.create_key("default", {Scope.ADMIN}, "mine")

    assert re.fullmatch(r"cl-[0-9a-f]{8}-[A-Za-z0-9_-]{43}", secret)
    assert await stores.keys.authenticate(secret) == key
    assert key.policy == "default"
    assert key.scopes == {Scope.ADMIN}


async def test_a_key_keeps_the_policies_that_it_may_choose(stores: Stores) -> None:
    await stores.add_policy("anna")
    key, secret = await stores.keys.create_key(
        "default", {Scope.CHAT}, "mine", policies=["anna", "default", "anna", ANY_POLICY]
    )
    assert key.policies == {"anna", ANY_POLICY}
    assert await stores.keys.authenticate(secret) == key
    listed = {entry.id: entry.policies for entry in await stores.keys.list_keys()}
    assert (listed[key.id], listed[stores.key]) == (frozenset({"anna", ANY_POLICY}), frozenset())


@pytest.mark.parametrize("wrong", ["", "nonsense", "cl-00000000-" + "A" * 43, "\0", "ä" * 60, "cl-%-" + "A" * 43])
async def test_anything_else_does_not_authenticate(stores: Stores, wrong: str) -> None:
    assert await stores.keys.authenticate(wrong) is None


async def test_the_public_prefix_alone_does_not_authenticate(stores: Stores) -> None:
    _, secret = await stores.keys.create_key("default", {Scope.CHAT}, "mine")
    last = "A" if secret[-1] != "A" else "B"

    assert await stores.keys.authenticate(secret[:11]) is None
    assert await stores.keys.authenticate(secret[:-1] + last) is None


async def test_a_revoked_key_does_not_authenticate_and_stays_listed(stores: Stores) -> None:
    key, secret = await stores.keys.create_key("default", {Scope.CHAT}, "mine")
    prefix = secret[:11]

    assert await stores.keys.revoke(prefix)
    assert not await stores.keys.revoke(prefix)

    assert await stores.keys.authenticate(secret) is None
    listed = {entry.id: entry for entry in await stores.keys.list_keys()}
    assert listed[key.id].revoked_at is not None
    assert listed[key.id].prefix == prefix


async def test_a_key_that_expired_does_not_authenticate_and_stays_listed(stores: Stores) -> None:
    now = datetime.now(UTC)
    past, future = now - timedelta(seconds=1), now + timedelta(days=1)
    old, expired = await stores.keys.create_key("default", {Scope.CHAT}, "old", past)
    new, secret = await stores.keys.create_key("default", {Scope.CHAT}, "new", future)
    assert await stores.keys.authenticate(expired) is None
    assert await stores.keys.stored_key(expired[:11]) is None
    found = await stores.keys.authenticate(secret)
    assert found == new
    assert found.expires_at == future
    listed = {entry.id: entry.expires_at for entry in await stores.keys.list_keys()}
    assert (listed[old.id], listed[new.id]) == (past, future)


async def test_a_valid_key_is_found_by_its_prefix_with_the_hash_that_signs_its_logins(stores: Stores) -> None:
    key, secret = await stores.keys.create_key("default", {Scope.READ}, "mine")
    assert await stores.keys.stored_key(secret[:11]) == StoredKey(key, hashlib.sha256(secret.encode()).digest())
    assert await stores.keys.stored_key("cl-00000000") is None
    await stores.keys.revoke(secret[:11])
    assert await stores.keys.stored_key(secret[:11]) is None


async def test_revoked_keys_do_not_count_as_keys(stores: Stores) -> None:
    assert await stores.keys.any_keys()
    for entry in await stores.keys.list_keys():
        await stores.keys.revoke(entry.prefix)
    assert not await stores.keys.any_keys()


async def test_the_secret_is_stored_nowhere(database: Database, postgres_url: str) -> None:
    import psycopg

    _, secret = await PostgresKeyStore(database).create_key("default", {Scope.CHAT}, "mine")

    with psycopg.connect(postgres_url) as connection:
        (row,) = connection.execute("SELECT api_keys::text FROM api_keys").fetchall()
    assert secret[:11] in row[0]
    assert secret[12:] not in row[0]
    assert secret[12:].encode().hex() not in row[0]


async def test_a_key_needs_a_policy_that_exists(database: Database) -> None:
    with pytest.raises(SetupError, match="no policy 'other'"):
        await PostgresKeyStore(database).create_key("other", {Scope.CHAT}, "mine")
    with pytest.raises(SetupError, match="no policy 'other'"):
        await PostgresKeyStore(database).create_key("default", {Scope.CHAT}, "mine", policies=["other"])


async def test_a_keys_limits_are_its_own_and_come_with_it(database: Database) -> None:
    keys = PostgresKeyStore(database)
    _, secret = await keys.create_key("default", {Scope.CHAT}, "mine")
    _, other = await keys.create_key("default", {Scope.CHAT}, "other")
    limits = KeyLimits(requests_per_minute=10, concurrency=2)
    use = await keys.set_limits(secret[:11], limits)
    assert use is not None
    assert (use.limits, use.policy, use.last_turn_at) == (limits, "default", None)
    assert use == await keys.use_of(secret[:11])
    for one, expected in ((secret, limits), (other, KeyLimits())):
        key = await keys.authenticate(one)
        assert key is not None
        assert key.limits == expected
    for unknown in ("cl-00000000", "\0"):
        assert await keys.use_of(unknown) is None
        assert await keys.set_limits(unknown, limits) is None


# Gateways are notified of a new active version at once, also after PostgreSQL was down.


async def soon(notices: AsyncIterator[None]) -> None:
    async with asyncio.timeout(30):
        await anext(notices)


async def commit(database: Database, url: str, n: int) -> PostgresPublishingStore:
    """A version that an engine has."""
    execute(url, f"INSERT INTO versions (policy, n, parent, path) VALUES ('default', {n}, {n - 1}, 'v{n}')")
    execute(url, f"UPDATE policies SET head = {n}")
    await add_engine(database, "http://gpu:8100")
    store = PostgresPublishingStore(database)
    await store.loaded("gpu:8100", "default", n)
    return store


async def test_each_activation_notifies_listeners(database: Database, postgres_url: str) -> None:
    async with aclosing(PostgresListener(postgres_url).changes()) as notices:
        await soon(notices)  # it listens
        store = await commit(database, postgres_url, 1)
        assert await store.activate("default", 1, 0)
        await soon(notices)
        for n in (2, 3):  # while nothing listens
            await commit(database, postgres_url, n)
            assert await store.activate("default", n, 0)
        await soon(notices)


async def test_a_reconnection_counts_as_a_change(database: Database, postgres_url: str) -> None:
    async with aclosing(PostgresListener(postgres_url).changes()) as notices:
        await soon(notices)
        waiting = asyncio.create_task(soon(notices))
        await asyncio.sleep(0.1)
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            ended = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'clawloop notices'"
            ).fetchall()
        assert (True,) in ended  # that of a listener before it may be ending yet
        await waiting


async def test_a_gateway_sees_a_new_version_before_its_next_poll(
    database: Database, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawloop.serving.directory.REFRESH_SECONDS", 3600.0)
    async with DirectoryCache(PostgresDirectoryStore(database).read, PostgresListener(postgres_url).changes) as cache:
        await asyncio.sleep(0.5)
        assert cache.policy("default").active == 0
        store = await commit(database, postgres_url, 1)
        assert await store.activate("default", 1, 0)
        async with asyncio.timeout(30):  # the next poll is in an hour
            while cache.policy("default").active != 1:
                await asyncio.sleep(0.005)
