"""Which version answers a request: the active one, except that a chain of tool calls stays on one version."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from api.ports import TurnStore
from clawloop.contracts.serving import Policy
from clawloop.contracts.turns import Message, SessionEvidence
from clawloop.errors import StoreUnavailable
from clawloop.ids import ApiKeyId
from clawloop.turns.canonical import is_volatile, response_digest

# Answers whose version is cached; about 200 bytes each.
CACHE_SIZE = 20_000
# After a failed look-up PostgreSQL is not queried for this long.
RETRY_INTERVAL_SECONDS = 1.0


class VersionChooser:
    """Caches which version gave which answer; asks the store for older ones."""

    def __init__(self, store: TurnStore) -> None:
        self._store = store
        self._recent: OrderedDict[tuple[ApiKeyId, bytes], int] = OrderedDict()
        self._retry_at = 0.0

    async def choose(
        self, key: ApiKeyId, policy: Policy, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int:
        """The version for a request with these messages."""
        last = next((message for message in reversed(messages) if not is_volatile(message)), None)
        if policy.active == 0 or last is None or last.get("role") != "tool":
            return policy.active
        call = next((message for message in reversed(messages) if message.get("role") == "assistant"), None)
        digest = None if call is None else response_digest(call)
        if digest is None:
            return policy.active
        if (recent := self._recent.get((key, digest))) is not None:
            return recent
        if time.monotonic() < self._retry_at:
            return policy.active
        try:
            version = await self._store.version_of_parent(key, evidence, messages)
        except StoreUnavailable:
            self._retry_at = time.monotonic() + RETRY_INTERVAL_SECONDS
            return policy.active
        return policy.active if version is None else version

    def remember(self, key: ApiKeyId, response: Message | None, version: int) -> None:
        """Cache that this version gave this response."""
        digest = None if response is None else response_digest(response)
        if digest is None:
            return
        self._recent[key, digest] = version
        self._recent.move_to_end((key, digest))
        if len(self._recent) > CACHE_SIZE:
            self._recent.popitem(last=False)
