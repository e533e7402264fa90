"""Choice of the version for a request: the active one, or the canary; a chain of tool calls stays on one version."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cachetools import LRUCache

from api.stores import TurnStore
from clawloop.core.contracts.serving import Policy
from clawloop.core.contracts.turns import Message, SessionEvidence
from clawloop.core.errors import StoreUnavailable
from clawloop.core.ids import ApiKeyId
from clawloop.core.samples.decision import is_in_share
from clawloop.core.turns.canonical import EMPTY_RESPONSE, is_volatile, response_digest

# Answers whose version is cached; about 200 bytes each.
CACHE_SIZE = 20_000
# After a failed look-up PostgreSQL is not queried for this long.
RETRY_INTERVAL_SECONDS = 1.0


class VersionChooser:
    """Caches which version gave which answer; asks the store for older ones."""

    def __init__(self, store: TurnStore) -> None:
        self._store = store
        self._recent: LRUCache[tuple[ApiKeyId, str, bytes], int] = LRUCache(CACHE_SIZE)
        self._retry_at = 0.0

    async def choose(
        self,
        key: ApiKeyId,
        policy: Policy,
        evidence: SessionEvidence,
        messages: Sequence[Message],
        conversation: str,
    ) -> int:
        """The version for a request with these messages.

        Args:
            conversation: the same for all requests of a conversation; decides who gets a canary.
        """
        chosen = policy.active
        if policy.canary is not None and is_in_share(
            f"{policy.id}/{policy.canary}/{conversation}", policy.canary_share
        ):
            chosen = policy.canary
        last = next((message for message in reversed(messages) if not is_volatile(message)), None)
        if chosen == policy.active == 0 or last is None or last.get("role") != "tool":
            return chosen
        call = next((message for message in reversed(messages) if message.get("role") == "assistant"), None)
        digest = EMPTY_RESPONSE if call is None else response_digest(call)
        if digest == EMPTY_RESPONSE:
            return chosen
        if (recent := self._recent.get((key, policy.id, digest))) is not None:
            return recent
        if time.monotonic() < self._retry_at:
            return chosen
        try:
            version = await self._store.version_of_parent(key, evidence, messages)
        except StoreUnavailable:
            self._retry_at = time.monotonic() + RETRY_INTERVAL_SECONDS
            return chosen
        return chosen if version is None else version

    def remember(self, key: ApiKeyId, policy: str, response: Message, version: int) -> None:
        """Cache that this version of the policy gave this response."""
        digest = response_digest(response)
        if digest != EMPTY_RESPONSE:
            self._recent[key, policy, digest] = version
