"""Operators' changes to API keys: list, create and revoke them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Protocol

from clawloop.core.contracts.answers import KeyList, KeyRevoked, KeyView, NewKey, StoredKey
from clawloop.core.contracts.serving import ApiKey, KeyEntry, KeyLimits, KeyUse, Scope
from clawloop.core.errors import AmbiguousId, NotFound
from clawloop.core.ids import ApiKeyId

# A hundred years: a date far beyond could not be stored.
MOST_DAYS = 36_500


class KeyStore(Protocol):
    """Keys, with their limits and use. Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    async def authenticate(self, secret: str) -> ApiKey | None:
        """The key with this secret; None if there is none, or it was revoked or has expired.

        Raises:
            StoreUnavailable: the key could not be looked up, so it may be valid.
        """

    async def signing_secret(self) -> bytes:
        """The secret that episode keys are signed with."""

    async def stored_key(self, prefix: str) -> StoredKey | None:
        """The valid key of a person or program with this public prefix; None if there is none."""

    async def list_keys(self) -> list[KeyEntry]:
        """All keys of people and programs, revoked ones included, oldest first."""

    async def create_key(
        self,
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

    async def revoke(self, prefix: str) -> bool:
        """Revoke the key with this public part; False if no valid key has it."""

    async def use_of(self, prefix: str) -> KeyUse | None:
        """Use and limits of the key; None if no person or program has such a key."""

    async def set_limits(self, prefix: str, limits: KeyLimits) -> KeyUse | None:
        """Replace a key's limits; gateways follow within 30 s. None if there is no such key."""

    async def stored_bytes(self, keys: Sequence[ApiKeyId]) -> dict[ApiKeyId, int]:
        """Stored bytes of these keys, without the keys that store nothing."""


class KeyOperations:
    def __init__(self, store: KeyStore) -> None:
        self._store = store

    async def list(self) -> KeyList:
        """All keys, without their secrets."""
        return KeyList(keys=[_view(entry) for entry in await self._store.list_keys()])

    async def create(
        self,
        policy: str,
        scopes: Iterable[Scope],
        name: str,
        days: int | None = None,
        policies: Iterable[str] = (),
    ) -> NewKey:
        """A new key with its secret, which cannot be shown again.

        Args:
            days: after which it expires, 1 to `MOST_DAYS`; None: it does not.
            policies: what a header may choose besides `policy`, or `ANY_POLICY`.

        Raises:
            SetupError: there is no such policy.
            StateConflict: a policy of it has lessons, which are for one reader.
        """
        expires_at = None if days is None else datetime.now(UTC) + timedelta(days=days)
        key, secret = await self._store.create_key(policy, scopes, name, expires_at, policies)
        kind, public, _ = secret.split("-", 2)
        return NewKey(
            key=secret,
            prefix=f"{kind}-{public}",
            policy=policy,
            policies=sorted(key.policies),
            name=name,
            scopes=sorted(key.scopes),
            expires_at=expires_at,
        )

    async def use_of(self, reference: str) -> KeyUse:
        """Limits, policy, expiry and newest turn of a key; `reference` and errors as of `revoke`."""
        return await self._use(reference, self._store.use_of)

    async def set_limits(self, reference: str, limits: KeyLimits) -> KeyUse:
        """Replace a key's limits; gateways follow within 30 s. `reference` and errors as of `revoke`."""
        return await self._use(reference, lambda prefix: self._store.set_limits(prefix, limits))

    async def _use(self, reference: str, of: Callable[[str], Awaitable[KeyUse | None]]) -> KeyUse:
        use = await of(_find(await self._store.list_keys(), reference).prefix)
        if use is None:
            raise _unknown(reference)
        return use

    async def revoke(self, reference: str) -> KeyRevoked:
        """End a key; gateways refuse it within 30 s.

        Args:
            reference: its public part or the beginning of it, or its name.

        Raises:
            NotFound, AmbiguousId
        """
        valid = [entry for entry in await self._store.list_keys() if entry.revoked_at is None]
        entry = _find(valid, reference)
        await self._store.revoke(entry.prefix)
        return KeyRevoked(prefix=entry.prefix)


def _find(keys: Sequence[KeyEntry], reference: str) -> KeyEntry:
    found = [entry for entry in keys if reference == entry.prefix]
    found = found or [entry for entry in keys if reference and reference == entry.name]
    found = found or [entry for entry in keys if reference and _begins(entry.prefix, reference)]
    if not found:
        raise _unknown(reference)
    if len(found) > 1:
        prefixes = ", ".join(entry.prefix for entry in found)
        raise AmbiguousId(f"{reference!r} may be several keys: {prefixes}. Give one of them.", field="prefix")
    return found[0]


def _unknown(reference: str) -> NotFound:
    message = f"There is no such key {reference!r}; `clawloop key list` shows all keys."
    return NotFound(message, code="not_found", field="prefix")


def _begins(prefix: str, reference: str) -> bool:
    return prefix.startswith(reference) or prefix.removeprefix("cl-").startswith(reference)


def _view(entry: KeyEntry) -> KeyView:
    return KeyView(
        id=entry.id,
        name=entry.name,
        prefix=entry.prefix,
        policy=entry.policy,
        policies=sorted(entry.policies),
        scopes=sorted(entry.scopes),
        created_at=entry.created_at,
        revoked_at=entry.revoked_at,
        expires_at=entry.expires_at,
    )
