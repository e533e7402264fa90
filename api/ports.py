"""What the gateway needs from outside, as it would like to be told it.

Knows nothing about who answers: PostgreSQL and vLLM in production, fakes in fast tests; both satisfy the same
contract suite (tests/contract).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clawloop.contracts import ApiKey, Directory, EnteredTurn, Message, SessionEvidence, TurnRecord
from clawloop.ids import ApiKeyId


class TurnStore(Protocol):
    """Where turns are kept for good."""

    async def enter(self, record: TurnRecord) -> EnteredTurn:
        """Store one turn in one transaction: its session, its parent, its tokens. Twice is once.

        Raises:
            StoreUnavailable: nothing was stored as far as we know; try again later.
            RecordUnusable: this record can never be stored.
        """

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        """The version that answered the turn these messages continue; None if they continue none.

        Raises:
            StoreUnavailable
        """


class KeyStore(Protocol):
    async def authenticate(self, secret: str) -> ApiKey | None:
        """The key this secret is, or None if it is none of ours or was revoked.

        Raises:
            StoreUnavailable: it could not be looked up; that says nothing about the key.
        """


class DirectoryStore(Protocol):
    async def read(self) -> Directory:
        """Policies and engines as they are now.

        Raises:
            StoreUnavailable
        """
