"""API keys: found by their public prefix, verified by a hash, with what each may use; the secret of episode keys."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, delete, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.answers import StoredKey
from clawloop.core.contracts.serving import ANY_POLICY, ApiKey, KeyEntry, KeyLimits, KeyUse, Scope
from clawloop.core.episodes.keys import SECRET_BYTES, is_episode_key
from clawloop.core.errors import SetupError, StateConflict
from clawloop.core.ids import ApiKeyId, EpisodeId, new_api_key_id
from db.content import storable
from db.database import PostgresStore, transaction
from db.tables import ApiKeyRow, PolicyRow, SessionRow, SigningKeyRow, StoredBytesRow

# Keys -----------------------------------------------------------------------------------------------------------------
# Stores API keys: found by their public prefix, verified by a hash, shown once.
#
# A key reads `cl-PUBLIC-SECRET`. The secret part is 256 random bits, so one SHA-256 is enough: there is nothing to
# guess, and a slow hash would only slow down every request.

_PUBLIC_BYTES = 4
_SECRET_BYTES = 32
_FORM = re.compile(r"(cl-[0-9a-f]{8})-[A-Za-z0-9_-]{43}")


_READERS = text("""
    SELECT prefix FROM api_keys
    WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now()) AND episode_id IS NULL
        AND 'chat' = ANY(scopes) AND (policy = :policy OR policies && ARRAY[CAST(:policy AS text), :any])
    ORDER BY id
""")
_FOR_ONE_READER = text("""
    SELECT p.id FROM policies p JOIN recipes r ON r.hash = p.recipe_hash
    WHERE p.retired_at IS NULL AND (CAST(:named AS text[]) IS NULL OR p.id = ANY(:named))
        AND r.content->'lessons'->>'enabled' = 'true' AND r.content->'lessons'->>'shared' = 'false'
    ORDER BY p.id
""")


def secretless_key(key: ApiKeyId, policy: str, name: str) -> dict[str, Any]:
    """The row of a key without a known secret, for turns whose key is not known here."""
    return {
        "id": key,
        "policy": policy,
        "name": name,
        # The end of an id is random; its beginning is the time, which several keys may share.
        "prefix": f"cl-{key.hex[-2 * _PUBLIC_BYTES :]}",
        "secret_sha256": _sha256(secrets.token_urlsafe(_SECRET_BYTES)),
        "scopes": [Scope.CHAT],
        "revoked_at": func.now(),
    }


class PostgresKeyStore(PostgresStore):
    """Implements `clawloop.operations.keys.KeyStore`. Every method raises StoreUnavailable while PostgreSQL is down."""

    async def authenticate(self, secret: str) -> ApiKey | None:
        if is_episode_key(secret):
            return await self._authenticate(secret.partition(".")[0], secret)
        parts = _FORM.fullmatch(secret)
        return None if parts is None else await self._authenticate(parts[1], secret)

    @transaction
    async def signing_secret(self, connection: AsyncConnection) -> bytes:
        return await signing_secret(connection)

    @transaction
    async def drop_signing_secret(self, connection: AsyncConnection) -> None:
        """Have a new secret made for keys of the next episodes; gateways read it within half a minute."""
        await drop_signing_secret(connection)

    @transaction
    async def _authenticate(self, connection: AsyncConnection, prefix: str, secret: str) -> ApiKey | None:
        query = select(ApiKeyRow).where(ApiKeyRow.prefix == prefix, ApiKeyRow.revoked_at.is_(None), _alive())
        row = (await connection.execute(query)).one_or_none()
        if row is None or not hmac.compare_digest(row.secret_sha256, _sha256(secret)):
            return None
        return _key(row)

    @transaction
    async def stored_key(self, connection: AsyncConnection, prefix: str) -> StoredKey | None:
        query = select(ApiKeyRow).where(ApiKeyRow.prefix == storable(prefix), ApiKeyRow.episode_id.is_(None), _alive())
        row = (await connection.execute(query.where(ApiKeyRow.revoked_at.is_(None)))).one_or_none()
        if row is None:
            return None
        return StoredKey(_key(row), row.secret_sha256)

    @transaction
    async def create_key(
        self,
        connection: AsyncConnection,
        policy: str,
        scopes: Iterable[Scope],
        name: str,
        expires_at: datetime | None = None,
        policies: Iterable[str] = (),
    ) -> tuple[ApiKey, str]:
        """A new key and its secret, which is not stored.

        Raises:
            SetupError: there is no such policy.
            StateConflict: a policy of it has lessons, which are for one reader.
        """
        key = ApiKey(
            new_api_key_id(), policy, frozenset(scopes), expires_at=expires_at, policies=frozenset(policies) - {policy}
        )
        prefix = f"cl-{secrets.token_hex(_PUBLIC_BYTES)}"
        secret = f"{prefix}-{secrets.token_urlsafe(_SECRET_BYTES)}"
        if Scope.CHAT in key.scopes:
            await _lock_policies(connection, policy, key.policies)
        for named in (policy, *sorted(key.policies - {ANY_POLICY})):
            there = select(PolicyRow.id).where(PolicyRow.id == storable(named), PolicyRow.retired_at.is_(None))
            if await connection.scalar(there) is None:
                raise SetupError(
                    f"there is no policy {named!r}: `clawloop policy list` shows those there are, and `clawloop policy"
                    " create NAME` makes one; `clawloop up` or `clawloop migrate --base-model NAME` makes `default`"
                )
        if Scope.CHAT in key.scopes:
            await _require_no_second_reader(connection, policy, key.policies)
        await connection.execute(
            insert(ApiKeyRow).values(
                id=key.id,
                policy=policy,
                policies=sorted(key.policies),
                name=storable(name),
                prefix=prefix,
                secret_sha256=_sha256(secret),
                scopes=sorted(key.scopes),
                expires_at=expires_at,
            )
        )
        return key, secret

    @transaction
    async def revoke(self, connection: AsyncConnection, prefix: str) -> bool:
        """Revoke the key with this prefix; False if no valid key has it."""
        valid = update(ApiKeyRow).where(ApiKeyRow.prefix == prefix, ApiKeyRow.revoked_at.is_(None))
        return (await connection.execute(valid.values(revoked_at=func.now()))).rowcount == 1

    @transaction
    async def list_keys(self, connection: AsyncConnection) -> list[KeyEntry]:
        """All keys of people and programs, revoked ones included, oldest first; keys of episodes live for minutes."""
        of_people = select(ApiKeyRow).where(ApiKeyRow.episode_id.is_(None)).order_by(ApiKeyRow.id)
        return [
            KeyEntry(
                id=ApiKeyId(row.id),
                name=row.name,
                prefix=row.prefix,
                policy=row.policy,
                scopes=frozenset(map(Scope, row.scopes)),
                created_at=row.created_at,
                revoked_at=row.revoked_at,
                expires_at=row.expires_at,
                policies=frozenset(row.policies),
            )
            for row in await connection.execute(of_people)
        ]

    @transaction
    async def any_keys(self, connection: AsyncConnection) -> bool:
        """True if a valid key exists; without one the gateway listens on loopback only."""
        of_people = select(ApiKeyRow.id).where(ApiKeyRow.revoked_at.is_(None), ApiKeyRow.episode_id.is_(None))
        return await connection.scalar(of_people.where(_alive()).limit(1)) is not None

    @transaction
    async def use_of(self, connection: AsyncConnection, prefix: str) -> KeyUse | None:
        return await _read(connection, prefix)

    @transaction
    async def set_limits(self, connection: AsyncConnection, prefix: str, limits: KeyLimits) -> KeyUse | None:
        row = update(ApiKeyRow).where(ApiKeyRow.prefix == storable(prefix), ApiKeyRow.episode_id.is_(None))
        await connection.execute(
            row.values(
                requests_per_minute=limits.requests_per_minute,
                tokens_per_minute=limits.tokens_per_minute,
                concurrency=limits.concurrency,
                stored_mib=limits.stored_mib,
            )
        )
        return await _read(connection, prefix)

    @transaction
    async def stored_bytes(self, connection: AsyncConnection, keys: Sequence[ApiKeyId]) -> dict[ApiKeyId, int]:
        total = func.sum(StoredBytesRow.bytes)
        of_keys = select(StoredBytesRow.api_key_id, total).where(StoredBytesRow.api_key_id.in_(keys))
        rows = (await connection.execute(of_keys.group_by(StoredBytesRow.api_key_id))).all()
        return {ApiKeyId(key): int(size) for key, size in rows}


async def readers_of(connection: AsyncConnection, policy: str) -> list[str]:
    """The public parts of the valid keys of people and programs that chat with a policy, oldest first."""
    return list((await connection.scalars(_READERS, {"policy": policy, "any": ANY_POLICY})).all())


async def require_one_reader(connection: AsyncConnection, policy: str) -> None:
    """
    Raises:
        StateConflict: the policy has lessons for one reader, and several keys may chat with it.
    """
    if await connection.scalar(_FOR_ONE_READER, {"named": [policy]}) is None:
        return
    if len(readers := await readers_of(connection, policy)) > 1:
        raise StateConflict(
            f"Policy {policy!r} would have lessons for one reader, and {len(readers)} keys may chat with it"
            f" ({', '.join(readers[:3])}, …): who has one could ask for the lessons of another one's user. Revoke the"
            " others (`clawloop key revoke`), or give it a recipe with lessons.shared = true or lessons.enabled ="
            " false.",
            code="lessons_not_shared",
            field="recipe",
        )


async def _lock_policies(connection: AsyncConnection, policy: str, may_choose: Iterable[str]) -> None:
    """Wait for who turns their lessons on, makes a policy like one of them, or retires one."""
    locked = select(PolicyRow.id).where(PolicyRow.retired_at.is_(None)).order_by(PolicyRow.id)
    if ANY_POLICY not in may_choose:
        locked = locked.where(PolicyRow.id.in_([storable(named) for named in (policy, *may_choose)]))
    await connection.execute(locked.with_for_update(key_share=True))


async def _require_no_second_reader(connection: AsyncConnection, policy: str, may_choose: Iterable[str]) -> None:
    named = None if ANY_POLICY in may_choose else [policy, *may_choose]
    for taught in (await connection.scalars(_FOR_ONE_READER, {"named": named})).all():
        if readers := await readers_of(connection, taught):
            raise StateConflict(
                f"Policy {taught!r} has lessons of the user of {readers[0]}, and who has a second key could ask for"
                " them: give the key another policy (`clawloop policy create`), revoke the first one"
                f" (`clawloop key revoke {readers[0]}`), or set lessons.shared = true or lessons.enabled = false in the"
                " recipe.",
                code="lessons_not_shared",
                field="policy",
            )


def _alive() -> ColumnElement[bool]:
    return or_(ApiKeyRow.expires_at.is_(None), ApiKeyRow.expires_at > func.now())


def _key(row: Any) -> ApiKey:
    return ApiKey(
        ApiKeyId(row.id),
        row.policy,
        frozenset(map(Scope, row.scopes)),
        None if row.episode_id is None else EpisodeId(row.episode_id),
        row.expires_at,
        KeyLimits(row.requests_per_minute, row.tokens_per_minute, row.concurrency, row.stored_mib),
        frozenset(row.policies),
    )


def _sha256(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


async def _read(connection: AsyncConnection, prefix: str) -> KeyUse | None:
    newest = select(func.max(SessionRow.last_turn_at)).where(SessionRow.api_key_id == ApiKeyRow.id)
    stored = select(func.coalesce(func.sum(StoredBytesRow.bytes), 0)).where(StoredBytesRow.api_key_id == ApiKeyRow.id)
    query = select(
        ApiKeyRow.__table__,
        newest.scalar_subquery().label("last_turn_at"),
        stored.scalar_subquery().label("stored_bytes"),
    )
    of_people = query.where(ApiKeyRow.prefix == storable(prefix), ApiKeyRow.episode_id.is_(None))
    row = (await connection.execute(of_people)).mappings().one_or_none()
    if row is None:
        return None
    return KeyUse(
        prefix=row["prefix"],
        name=row["name"],
        policy=row["policy"],
        limits=KeyLimits(row["requests_per_minute"], row["tokens_per_minute"], row["concurrency"], row["stored_mib"]),
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
        last_turn_at=row["last_turn_at"],
        stored_bytes=max(0, int(row["stored_bytes"])),
    )


# Episode keys ---------------------------------------------------------------------------------------------------------
# The secret that episode keys are signed with, read by every gateway and worker; made where there is none.

_NAME = "episodes"


async def signing_secret(connection: AsyncConnection) -> bytes:
    """The secret, in the caller's transaction; made if there is none."""
    query = select(SigningKeyRow.secret).where(SigningKeyRow.name == _NAME)
    secret: bytes | None = await connection.scalar(query)
    if secret is None:
        new = insert(SigningKeyRow).values(name=_NAME, secret=secrets.token_bytes(SECRET_BYTES))
        await connection.execute(new.on_conflict_do_nothing())
        secret = (await connection.execute(query)).scalar_one()
    return secret


async def drop_signing_secret(connection: AsyncConnection) -> None:
    """Have a new one made for the next episode. Keys that were handed out stay valid: PostgreSQL has their SHA-256."""
    await connection.execute(delete(SigningKeyRow).where(SigningKeyRow.name == _NAME))
