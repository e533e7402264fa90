"""Protocols of what the gateway needs from outside, grouped by the package that calls them.

Implemented over PostgreSQL, vLLM and Temporal, and by fakes in fast tests; both pass the same contract suite
(tests/contract). Each implementation limits its own time: a call returns or raises within that limit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Protocol

from clawloop.contracts.answers import (
    Counts,
    PolicyEvent,
    ReplyFigures,
    StoredKey,
    TrainedReply,
)
from clawloop.contracts.serving import ApiKey, KeyLimits, KeyUse, RouteKey, Scope, ServedModel
from clawloop.contracts.sessions import (
    FeedbackAnswer,
    FeedbackEffect,
    RepeatableRequest,
    StoredFeedback,
)
from clawloop.contracts.turns import InsertedTurn, Message, SessionEvidence, StoredTurn, TurnRecord
from clawloop.contracts.views import FeedbackView
from clawloop.ids import ApiKeyId, FeedbackId, SessionId, TurnId

# Called by api/auth.py and api/health.py


class KeyStore(Protocol):
    async def authenticate(self, secret: str) -> ApiKey | None:
        """The key with this secret; None if there is none, or it was revoked or has expired.

        Raises:
            StoreUnavailable: the key could not be looked up, so it may be valid.
        """

    async def signing_secret(self) -> bytes:
        """The secret that episode keys are signed with.

        Raises:
            StoreUnavailable
        """

    async def stored_key(self, prefix: str) -> StoredKey | None:
        """The valid key of a person or program with this public prefix; None if there is none.

        Raises:
            StoreUnavailable
        """


class Readiness(Protocol):
    async def problems(self) -> list[str]:
        """The reasons that this gateway should get no traffic, one line each; empty if it is ready."""


class MetricsPages(Protocol):
    async def page(self, port: int | None) -> bytes:
        """Prometheus' text format, for a request that came to this port of the gateway."""


# Called by api/chat/


class Answer(Protocol):
    """An engine's answer after its headers: status 200, body not read yet."""

    @property
    def engine_id(self) -> str: ...

    def events(self) -> AsyncIterator[list[bytes]]:
        """The payloads of a stream's `data:` lines, those together that arrived together; ends before `[DONE]`.

        Raises:
            EngineBroke: the stream ended before `[DONE]`, went silent, or the connection broke.
        """

    async def body(self) -> bytes:
        """The body of an answer that is not streamed.

        Raises:
            EngineBroke
        """


class Engines(Protocol):
    """The engines in rotation."""

    def open_chat(
        self,
        route: RouteKey,
        body: bytes | Callable[[ServedModel], bytes],
        path: str = "/v1/chat/completions",
        trace: Mapping[str, str] | None = None,
        sending: Callable[[str], Awaitable[None]] | None = None,
    ) -> AbstractAsyncContextManager[Answer]:
        """Send a request to an engine that has the version; leaving the context ends the request there.

        Waits, for a limited time, while no such engine is healthy. Tries another engine if one cannot be reached.

        Args:
            body: or what makes it for the model of the engine that was chosen.
            path: the engine's route.
            trace: headers by which traces are joined.
            sending: awaited with the id of each engine that was found, before the request is sent to it.

        Raises:
            EngineRejected: the engine answered with an error.
            EngineBroke: the engine died before it answered.
            EngineUnavailable: no engine could take the request in time.
            EnginesBusy: those that could have as many chats as they may.
        """

    def mark_missing(self, engine_id: str, route: RouteKey) -> None:
        """Send the engine no request for this version until it may have loaded it again."""

    def has_version(self, policy: str, version: int) -> bool:
        """True if an engine that takes requests has this version."""

    def healthy(self) -> frozenset[str]:
        """The ids of the engines that answer."""


class VersionLoading(Protocol):
    async def want_for(self, policy: str, versions: Sequence[int], how_long: timedelta) -> None:
        """Have engines load these versions for a while, in place of others that were asked for so.

        Raises:
            RecordUnusable: there is no such policy.
            StoreUnavailable
        """


# Called by api/recording/; TurnStore also by api/chat/


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

    async def parent_of(self, turn_id: TurnId) -> TurnId | None:
        """The turn that a stored turn continues; None if that one is not stored, or not yet.

        Raises:
            StoreUnavailable
        """

    async def mark_notified(self, turn_ids: Sequence[TurnId]) -> None:
        """Record that the workflows of these turns were notified; keeps the time of the first call.

        Raises:
            StoreUnavailable
        """


class TurnReader(Protocol):
    async def load(self, turn_id: TurnId) -> StoredTurn | None:
        """The turn as it was stored; None if there is no such turn.

        Raises:
            StoreUnavailable
        """


class FileReader(Protocol):
    """Files of recorded messages; each call raises StoreUnavailable when PostgreSQL does not answer."""

    async def read(self, sha256: str) -> bytes | None:
        """Content of the file; None if no turn has it any more."""

    async def of_session(self, session: SessionId, sha256s: Collection[str]) -> dict[str, bytes]:
        """Contents of these files, as far as turns of the session have them."""


# Called by api/feedback.py and api/recording/


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

    async def mark_feedback_notified(self, feedback: FeedbackId) -> None:
        """Record that the session's workflow was notified of the feedback."""


# Called by api/ui/


class KeyMaker(Protocol):
    async def create_key(self, policy: str, scopes: Iterable[Scope], name: str) -> tuple[ApiKey, str]:
        """A new key and its secret, which is not stored.

        Raises:
            SetupError: there is no such policy.
            StoreUnavailable
        """


class KeyUses(Protocol):
    """Limits and use of keys. Every call raises StoreUnavailable when PostgreSQL does not answer."""

    async def use_of(self, prefix: str) -> KeyUse | None:
        """Use and limits of the key; None if no person or program has such a key."""

    async def set_limits(self, prefix: str, limits: KeyLimits) -> KeyUse | None:
        """Replace a key's limits; gateways follow within 30 s. None if there is no such key."""


class StoredByteCounts(Protocol):
    """Called by api/chat/key_limits.py."""

    async def stored_bytes(self, keys: Sequence[ApiKeyId]) -> dict[ApiKeyId, int]:
        """Stored bytes of these keys, without the keys that store nothing.

        Raises:
            StoreUnavailable
        """


class TrainingBrowser(Protocol):
    """Reads what training did. Every call raises StoreUnavailable when PostgreSQL does not answer."""

    async def batch(self, policy: str, step: int) -> list[TrainedReply]:
        """The samples of a step with their replies, in the batch's order."""

    async def events(self, policy: str, limit: int) -> list[PolicyEvent]:
        """Events of a policy, newest first."""

    async def replies(self, policy: str, limit: int) -> list[ReplyFigures]:
        """The newest main turns with a reply, oldest first."""

    async def counts(self, policy: str) -> Counts:
        """Numbers of a policy's sessions, turns and quarantined samples.

        Raises:
            NotFound: there is no such policy.
        """

    async def mark(self) -> str:
        """A value that changes whenever something that the page shows changes."""
