from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime, timedelta

import pytest

from clawloop.core.contracts.answers import StoredKey
from clawloop.core.contracts.serving import ANY_POLICY, KeyLimits, Scope
from clawloop.core.errors import SetupError
from db.database import Database
from db.serving.keys import PostgresKeyStore
from tests.contract.conftest import Stores


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
