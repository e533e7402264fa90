"""Protocols of what the gateway needs from outside, grouped by the package that calls them.

Implemented over PostgreSQL, vLLM and Temporal, and by fakes in fast tests; both pass the same contract suite
(tests/contract). Each implementation limits its own time: a call returns or raises within that limit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from clawloop.contracts.serving import ApiKey, RouteKey
from clawloop.contracts.sessions import (
    ContentErased,
    Erasure,
    FeedbackEffect,
    FeedbackGiven,
    RejudgeRequested,
    SessionFacts,
    SessionState,
    StoredFeedback,
    TurnRecorded,
)
from clawloop.contracts.training import TrainingView, VersionView
from clawloop.contracts.turns import InsertedTurn, Message, SessionEvidence, TurnRecord
from clawloop.contracts.views import SessionView, TurnView
from clawloop.ids import ApiKeyId, FeedbackId, SessionId, TurnId
from clawloop.judging.rejudging import RejudgeFacts
from clawloop.recipes.recipe import Recipe

# Called by api/auth.py and api/health.py


class KeyStore(Protocol):
    async def authenticate(self, secret: str) -> ApiKey | None:
        """The key with this secret; None if there is none, or it was revoked.

        Raises:
            StoreUnavailable: the key could not be looked up, so it may be valid.
        """


class Readiness(Protocol):
    async def problems(self) -> list[str]:
        """Why this gateway should get no traffic, one line each; empty if it should."""


# Called by api/chat/


class Answer(Protocol):
    """An engine's answer after its headers: status 200, body not read yet."""

    @property
    def engine_id(self) -> str: ...

    def events(self) -> AsyncIterator[bytes]:
        """The payloads of a stream's `data:` lines as they arrive; ends at `[DONE]`, which is not yielded.

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

    def open_chat(self, route: RouteKey, body: bytes) -> AbstractAsyncContextManager[Answer]:
        """Send a chat request to an engine that has the version; leaving the context ends the request there.

        Waits, for a limited time, while no such engine is healthy. Tries another engine if one cannot be reached.

        Raises:
            EngineRejected: the engine answered with an error.
            EngineBroke: the engine died before it answered.
            EngineUnavailable: no engine could take the request in time.
        """

    def mark_missing(self, engine_id: str, route: RouteKey) -> None:
        """Send the engine no request for this version until it may have loaded it again."""

    def has_version(self, policy: str, version: int) -> bool:
        """Whether an engine that takes requests has this version."""

    def healthy(self) -> frozenset[str]:
        """The ids of the engines that answer."""


# Called by api/recording/; TurnStore also by api/chat/


class TurnStore(Protocol):
    """Stores turns permanently."""

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        """Store one turn, with its session, parent and tokens, in one transaction. Idempotent.

        Raises:
            StoreUnavailable: not stored, as far as is known; try again later.
            RecordUnusable: this record can never be stored.
        """

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        """The version that answered the turn that these messages continue; None if they continue none.

        Raises:
            StoreUnavailable
        """

    async def mark_notified(self, turn_ids: Sequence[TurnId]) -> None:
        """Record that the workflows of these turns were notified; keeps the time of the first call.

        Raises:
            StoreUnavailable
        """


class SessionNotifier(Protocol):
    """Notifies session workflows."""

    async def notify_turn(self, session: SessionFacts, turn: TurnRecorded) -> None:
        """Signal the session's workflow, starting it if it does not run. Idempotent.

        Raises:
            SignalFailed: the signal failed; the sweep retries.
        """

    async def notify_feedback(self, session: SessionFacts, feedback: FeedbackGiven) -> None:
        """Signal feedback to the session's workflow, starting it if it does not run. Idempotent.

        Raises:
            SignalFailed
        """


# Called by api/feedback.py and api/recording/


class FeedbackStore(Protocol):
    """Stores feedback. Every call raises StoreUnavailable when PostgreSQL does not answer."""

    async def turn_of(self, key: ApiKeyId, session: str, number: int) -> TurnId | None:
        """The n-th main turn, from 1, of a session of this key, named by Clawloop's id or the client's own."""

    async def give(self, key: ApiKeyId, turn: TurnId, score: float | None, text: str | None) -> StoredFeedback | None:
        """Store feedback on a main turn of this key; None if it has no such turn, or the turn was erased."""

    async def give_outcome(self, key: ApiKeyId, session: str, outcome: int) -> FeedbackEffect | None:
        """Store whether the task of a session of this key succeeded; None if it has no such session.

        Args:
            session: Clawloop's id or the client's own.
            outcome: 1 or −1; a later one replaces an earlier one.
        """

    async def mark_feedback_notified(self, feedback: FeedbackId) -> None:
        """Record that the session's workflow was notified of the feedback."""


# Called by api/admin/


class SessionStore(Protocol):
    """Reads sessions and turns. Every call raises StoreUnavailable when PostgreSQL does not answer."""

    async def sessions(
        self, *, policy: str | None, state: SessionState | None, after: SessionId | None, limit: int
    ) -> list[SessionView]:
        """Sessions, the one with the newest turn first; `after` is the last session of the previous page.

        An unknown `after` gives an empty page.
        """

    async def session(self, session: SessionId) -> SessionView | None:
        """The session; None if there is no such session."""

    async def turns(self, session: SessionId) -> list[TurnView]:
        """All turns of a session in order, each with its outcome."""


class RejudgeStore(Protocol):
    """Reads what a re-judging depends on."""

    async def rejudge_facts(self, turn_id: TurnId) -> RejudgeFacts | None:
        """The facts about a turn; None if there is no such turn."""


class SessionOperations(Protocol):
    """Operators' requests to sessions' workflows. Every method raises SignalFailed if Temporal takes no signal."""

    async def rejudge(self, session: SessionFacts, wanted: RejudgeRequested) -> None:
        """Ask for another judgement of a turn. Idempotent for a revision."""

    async def content_erased(self, session: SessionId, erased: ContentErased) -> None:
        """Notify the session's workflow, if it has one, of erased turns."""


class Erasures(Protocol):
    """Erases content for good."""

    async def erase_session(self, session: SessionId) -> Erasure | None:
        """Erase a session, including turns of it not inserted yet; None if there is no such session."""

    async def erase_turn(self, turn: TurnId) -> Erasure | None:
        """Erase a turn, other replies to its request, and all turns that continue them; None if there is none."""


class Operations(Protocol):
    """What tells Temporal what an operator said, after PostgreSQL was told. It answers within its own limit.

    Every call raises SignalFailed when the workflow could not be told now; it holds nevertheless, and the
    workflow sees it when it looks next.
    """

    async def pause(self, policy: str, reason: str) -> None: ...

    async def resume(self, policy: str, retry: bool) -> None: ...

    async def roll_back(self, policy: str, version: int) -> None: ...

    async def pin(self, policy: str, version: int | None) -> None: ...

    async def set_recipe(self, policy: str, recipe: Recipe) -> None: ...


class TrainingStore(Protocol):
    """Operators' view of a policy's training, and their changes to it.

    Every method raises NotFound if there is no such policy.
    """

    async def status(self, policy: str) -> TrainingView:
        """The status of the policy's training."""

    async def versions(self, policy: str) -> list[VersionView]:
        """All versions of the policy, by number, removed ones included."""

    async def pause(self, policy: str, reason: str) -> TrainingView:
        """Claim no batch until `resume`; a claimed step finishes."""

    async def resume(self, policy: str, *, retry_quarantined: bool = False) -> TrainingView:
        """Claim batches again.

        Args:
            retry_quarantined: make quarantined samples fresh again.
        """

    async def roll_back(self, policy: str, version: int) -> TrainingView:
        """Continue from this version: it becomes the head at once, and active as soon as an engine has it.

        A claimed step is abandoned, a publishing in progress becomes invalid (the epoch changes), and turns trained by
        later steps are rolled back. Rolling forward to a rolled-back version works the same way.

        Raises:
            NotFound: there is no such version.
            StateConflict: its files were removed, or another version is pinned.
        """

    async def pin(self, policy: str, version: int) -> TrainingView:
        """Keep this version active, as soon as an engine has it and until `unpin`, whatever is trained.

        Raises:
            NotFound: there is no such version.
            StateConflict: its files were removed.
        """

    async def unpin(self, policy: str) -> TrainingView:
        """Make the newest version active again; nothing if none is pinned."""

    async def recipe(self, policy: str) -> Recipe:
        """The recipe that the policy learns by.

        Raises:
            NotFound: the policy has no recipe.
            StateConflict: the stored recipe is not valid any more.
        """

    async def set_recipe(self, policy: str, recipe: Recipe) -> TrainingView:
        """Learn by this recipe from the next step on; nothing if the policy does already.

        Waiting samples of another signal hash expire at once, for good: `recipe changed`.

        Raises:
            RecipeRejected: no step of it can start from the policy's head.
        """
