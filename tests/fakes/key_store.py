"""API keys in memory; passes the same contract suite as the store in PostgreSQL."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from clawloop.core.contracts.answers import StoredKey
from clawloop.core.contracts.serving import ApiKey, KeyEntry, KeyLimits, KeyUse, Scope
from clawloop.core.episodes.keys import EpisodeKey, sign
from clawloop.core.errors import StoreUnavailable
from clawloop.core.ids import ApiKeyId, new_api_key_id, new_episode_id

SIGNING_SECRET = b"k" * 32


class FakeKeyStore:
    """
    Attributes:
        available: False makes every call raise StoreUnavailable.
        lookups: how often `authenticate` was called.
        stored: bytes of each key.
        signing: the secret of keys of episodes.
    """

    def __init__(self) -> None:
        self.available = True
        self.lookups = 0
        self.signing = SIGNING_SECRET
        self._entries: dict[str, KeyEntry] = {}  # by secret
        self._episodes: dict[str, ApiKey] = {}  # by secret
        self._limits: dict[str, KeyLimits] = {}  # by prefix
        self.stored: dict[ApiKeyId, int] = {}

    def add(
        self,
        policy: str,
        scopes: Iterable[Scope],
        name: str = "test",
        expires_at: datetime | None = None,
        policies: Iterable[str] = (),
    ) -> str:
        """Add a key; returns its secret."""
        key = ApiKey(new_api_key_id(), policy, frozenset(scopes))
        prefix = f"cl-{secrets.token_hex(4)}"
        secret = f"{prefix}-{secrets.token_urlsafe(32)}"
        may_choose = frozenset(policies) - {policy}
        entry = KeyEntry(key.id, name, prefix, policy, key.scopes, datetime.now(UTC), None, expires_at, may_choose)
        self._entries[secret] = entry
        return secret

    def add_episode(self, policy: str, expires_at: datetime) -> tuple[ApiKey, str]:
        """Add an episode's key."""
        episode = new_episode_id()
        key = ApiKey(ApiKeyId(episode), policy, frozenset({Scope.CHAT}), episode, expires_at)
        secret = sign(EpisodeKey(episode, policy, expires_at), self.signing)
        self._episodes[secret] = key
        return key, secret

    def end_episode(self, secret: str) -> None:
        del self._episodes[secret]

    async def signing_secret(self) -> bytes:
        self._require_available()
        return self.signing

    async def authenticate(self, secret: str) -> ApiKey | None:
        self.lookups += 1
        self._require_available()
        if secret in self._episodes:
            return self._episodes[secret]
        entry = self._entries.get(secret)
        return None if entry is None or not _is_valid(entry) else self._key(entry)

    async def use_of(self, prefix: str) -> KeyUse | None:
        self._require_available()
        for entry in self._entries.values():
            if entry.prefix == prefix:
                limits = self._limits.get(prefix, KeyLimits())
                stored = self.stored.get(entry.id, 0)
                return KeyUse(
                    prefix, entry.name, entry.policy, limits, entry.expires_at, entry.revoked_at, None, stored
                )
        return None

    async def set_limits(self, prefix: str, limits: KeyLimits) -> KeyUse | None:
        if await self.use_of(prefix) is not None:
            self._limits[prefix] = limits
        return await self.use_of(prefix)

    async def stored_bytes(self, keys: Sequence[ApiKeyId]) -> dict[ApiKeyId, int]:
        self._require_available()
        return {key: self.stored[key] for key in keys if key in self.stored}

    async def stored_key(self, prefix: str) -> StoredKey | None:
        self._require_available()
        for secret, entry in self._entries.items():
            if entry.prefix == prefix and _is_valid(entry):
                return StoredKey(self._key(entry), hashlib.sha256(secret.encode()).digest())
        return None

    async def create_key(
        self,
        policy: str,
        scopes: Iterable[Scope],
        name: str,
        expires_at: datetime | None = None,
        policies: Iterable[str] = (),
    ) -> tuple[ApiKey, str]:
        self._require_available()
        secret = self.add(policy, scopes, name, expires_at, policies)
        return self._key(self._entries[secret]), secret

    async def revoke(self, prefix: str) -> bool:
        self._require_available()
        for secret, entry in self._entries.items():
            if entry.prefix == prefix and entry.revoked_at is None:
                self._entries[secret] = replace(entry, revoked_at=datetime.now(UTC))
                return True
        return False

    async def list_keys(self) -> list[KeyEntry]:
        self._require_available()
        return sorted(self._entries.values(), key=lambda entry: entry.id)

    async def any_keys(self) -> bool:
        self._require_available()
        return any(_is_valid(entry) for entry in self._entries.values())

    def _key(self, entry: KeyEntry) -> ApiKey:
        limits = self._limits.get(entry.prefix, KeyLimits())
        return ApiKey(entry.id, entry.policy, entry.scopes, None, entry.expires_at, limits, entry.policies)

    def _require_available(self) -> None:
        if not self.available:
            raise StoreUnavailable("the fake is set to be unavailable")


def _is_valid(entry: KeyEntry) -> bool:
    return entry.revoked_at is None and (entry.expires_at is None or entry.expires_at > datetime.now(UTC))
