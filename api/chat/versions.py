"""Which version answers a request: the active one, but a session does not change versions between tool steps.

Knows nothing about how versions are made or loaded.
"""

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

# Answers whose version is remembered without asking Postgres; about 200 bytes each.
REMEMBERED = 20_000
# After a failed look-up Postgres is not asked for this long.
AWAY_SECONDS = 1.0


class VersionChooser:
    """Chooses, and remembers which version gave which answer."""

    def __init__(self, store: TurnStore) -> None:
        self._store = store
        self._recent: OrderedDict[tuple[ApiKeyId, bytes], int] = OrderedDict()
        self._away_until = 0.0

    async def choose(
        self, key: ApiKeyId, policy: Policy, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int:
        last = next((message for message in reversed(messages) if not is_volatile(message)), None)
        if policy.active == 0 or last is None or last.get("role") != "tool":
            return policy.active
        asked = next((message for message in reversed(messages) if message.get("role") == "assistant"), None)
        digest = None if asked is None else response_digest(asked)
        if digest is None:
            return policy.active
        if (recent := self._recent.get((key, digest))) is not None:
            return recent
        if time.monotonic() < self._away_until:
            return policy.active
        try:
            found = await self._store.version_of_parent(key, evidence, messages)
        except StoreUnavailable:
            self._away_until = time.monotonic() + AWAY_SECONDS
            return policy.active
        return policy.active if found is None else found

    def remember(self, key: ApiKeyId, response: Message | None, version: int) -> None:
        digest = None if response is None else response_digest(response)
        if digest is None:
            return
        self._recent[key, digest] = version
        self._recent.move_to_end((key, digest))
        if len(self._recent) > REMEMBERED:
            self._recent.popitem(last=False)
