"""Protocols of what the gateway alone needs of PostgreSQL.

Implemented over PostgreSQL, and by fakes in fast tests; both pass the same contract suite
(tests/contract). Each implementation limits its own time: a call returns or raises within that limit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Protocol

from clawloop.core.contracts.sessions import (
    FeedbackAnswer,
    FeedbackEffect,
    RepeatableRequest,
    StoredFeedback,
)
from clawloop.core.contracts.turns import InsertedTurn, Message, SessionEvidence, StoredTurn, TurnRecord
from clawloop.core.contracts.views import FeedbackView
from clawloop.core.ids import ApiKeyId, FeedbackId, LessonId, SessionId, TurnId


class TurnStore(Protocol):
    """Stores turns permanently."""

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        """Store one turn, with its session, parent and tokens, in one transaction. Idempotent.

        Raises:
            StoreUnavailable: not stored, as far as is known; try again later.
            RecordUnusable: this record can never be stored.
        """

    async def insert_many(self, records: Sequence[TurnRecord]) -> list[InsertedTurn | Exception]:
        """Store turns as `insert` does, turns of different sessions in one transaction; in any order.

        Returns:
            For each record where it was stored, or the error that `insert` raises for it. An error of one record costs
            no other one.
        """

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        """The version that answered the turn that these messages continue; None if they continue none.

        Raises:
            StoreUnavailable
        """

    async def lessons_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> tuple[LessonId, ...] | None:
        """The lessons of the newest main turn whose conversation these messages continue; None if they continue none,
        as at a session's start and after a compaction.

        Raises:
            StoreUnavailable
        """

    async def parent_of(self, turn_id: TurnId) -> TurnId | None:
        """The turn that a stored turn continues; None if that one is not stored, or not yet.

        Raises:
            StoreUnavailable
        """

    async def load(self, turn_id: TurnId) -> StoredTurn | None:
        """The turn as it was stored; None if there is no such turn.

        Raises:
            StoreUnavailable
        """

    async def mark_notified(self, turn_ids: Sequence[TurnId], ago: timedelta) -> None:
        """Record that the workflows of these turns were notified; keeps the time of the first call.

        Does nothing if Temporal may have lost the signals since: the sweep sends them again.

        Args:
            ago: when the first of them was sent, before now.

        Raises:
            StoreUnavailable
        """


class FileReader(Protocol):
    """Files of recorded messages; each call raises StoreUnavailable when PostgreSQL does not answer."""

    async def read(self, sha256: str) -> bytes | None:
        """Content of the file; None if no turn has it any more."""

    async def of_session(self, session: SessionId, sha256s: Collection[str]) -> dict[str, bytes]:
        """Contents of these files, as far as turns of the session have them."""


class FeedbackStore(Protocol):
    """Stores feedback. Every call raises StoreUnavailable when PostgreSQL does not answer."""

    async def turn_of(self, key: ApiKeyId, policy: str, session: str | None, number: int | None) -> TurnId | None:
        """The n-th main turn, from 1, of a session of this key, named by Clawloop's id or the client's own.

        Args:
            policy: whose sessions are meant, if Clawloop's id does not name one.
            session: None: any of the key's with this policy.
            number: None: the newest turn that people read as an answer: one that does not end by calling a tool, if
                there is one. An agent that gives feedback by a tool is in the middle of a reply.
        """

    async def give(
        self,
        key: ApiKeyId,
        turn: TurnId,
        score: float | None,
        text: str | None,
        request: RepeatableRequest | None = None,
    ) -> StoredFeedback | None:
        """Store feedback on a main turn of this key; None if it has none, or it was erased or is an episode's.

        Raises:
            AlreadyAnswered: the request was answered before; nothing is stored.
        """

    async def give_outcome(
        self, key: ApiKeyId, policy: str, session: str, outcome: int, request: RepeatableRequest | None = None
    ) -> FeedbackEffect | None:
        """Store whether the task of a session of this key succeeded; None if it has none, or it is an episode's.

        Args:
            policy: whose session the client's own name means.
            session: Clawloop's id or the client's own.
            outcome: 1 or −1; a later one replaces an earlier one.

        Raises:
            AlreadyAnswered: the request was answered before; nothing is stored.
        """

    async def answer_to(self, key: ApiKeyId, request: RepeatableRequest) -> FeedbackAnswer | None:
        """The answer to this key's request with the same Idempotency-Key; None if there was none, or it was
        forgotten."""

    async def given_on(self, key: ApiKeyId, turn: TurnId) -> list[FeedbackView] | None:
        """All feedback on a main turn of this key, oldest first; None if it has no such turn."""

    async def mark_feedback_notified(self, feedback: FeedbackId, ago: timedelta) -> None:
        """Record that the session's workflow was notified of the feedback so long ago; as `TurnStore.mark_notified`."""
