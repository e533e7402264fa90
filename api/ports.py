"""Ports of the gateway: PostgreSQL, Temporal and vLLM in production, fakes in fast tests.

Stores and fakes pass the same contract tests (tests/contract). Every store method is one transaction with a time limit
of its own; it raises StoreUnavailable if PostgreSQL does not answer in time.
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


class TurnStore(Protocol):
    """Stores turns."""

    async def insert(self, record: TurnRecord) -> InsertedTurn:
        """Insert a turn with its session, parent and tokens. Idempotent.

        Raises:
            StoreUnavailable: the turn may not have been stored; retry later.
            RecordUnusable: the record can never be stored.
        """

    async def version_of_parent(
        self, key: ApiKeyId, evidence: SessionEvidence, messages: Sequence[Message]
    ) -> int | None:
        """The version that answered the turn these messages continue; None if they continue none."""

    async def mark_notified(self, turn_ids: Sequence[TurnId]) -> None:
        """Record that the turns' workflows were notified of them; the first time is kept."""


class SessionNotifier(Protocol):
    """Notifies sessions' workflows."""

    async def notify_turn(self, session: SessionFacts, turn: TurnRecorded) -> None:
        """Signal the session's workflow, and start it if it does not run. Idempotent.

        Raises:
            SignalFailed: the sweep retries.
        """

    async def notify_feedback(self, session: SessionFacts, feedback: FeedbackGiven) -> None:
        """Signal the session's workflow, and start it if it does not run. Idempotent.

        Raises:
            SignalFailed
        """


class FeedbackStore(Protocol):
    """Stores feedback."""

    async def turn_of(self, key: ApiKeyId, session: str, number: int) -> TurnId | None:
        """The n-th main turn, from 1, of a session of this key.

        Args:
            session: its id, or the client's own value.
        """

    async def give(self, key: ApiKeyId, turn: TurnId, score: float | None, text: str | None) -> StoredFeedback | None:
        """Store feedback on a main turn of this key; None if it has no such turn, or the turn was erased."""

    async def give_outcome(self, key: ApiKeyId, session: str, outcome: int) -> FeedbackEffect | None:
        """Store whether the task of a session of this key succeeded; None if it has no such session.

        Args:
            session: its id, or the client's own value.
            outcome: 1 or −1; a later one replaces an earlier one.
        """

    async def mark_feedback_notified(self, feedback: FeedbackId) -> None:
        """Record that the session's workflow was notified of the feedback."""


class SessionStore(Protocol):
    """Reads sessions and their turns for people."""

    async def sessions(
        self, *, policy: str | None, state: SessionState | None, after: SessionId | None, limit: int
    ) -> list[SessionView]:
        """A page of sessions, the one with the newest turn first.

        Args:
            after: the last session of the page before; an unknown one gives an empty page.
        """

    async def session(self, session: SessionId) -> SessionView | None:
        """The session; None if there is no such session."""

    async def turns(self, session: SessionId) -> list[TurnView]:
        """All turns of a session in their order."""


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


class KeyStore(Protocol):
    async def authenticate(self, secret: str) -> ApiKey | None:
        """The key with this secret; None if there is none or it was revoked."""


class Answer(Protocol):
    """An engine's answer that has begun: status 200, nothing read yet."""

    @property
    def engine_id(self) -> str: ...

    def events(self) -> AsyncIterator[bytes]:
        """The payloads of a stream's `data:` lines as they come, without `[DONE]`; ends after `[DONE]`.

        Raises:
            EngineBroke: it stopped before `[DONE]`, went silent, or the connection broke.
        """

    async def body(self) -> bytes:
        """The whole of an answer that is not a stream.

        Raises:
            EngineBroke
        """


class Engines(Protocol):
    """The engines in rotation."""

    def ask(self, wanted: RouteKey, body: bytes) -> AbstractAsyncContextManager[Answer]:
        """Send a chat request to an engine that has the version; leaving the context ends the request there.

        Waits, bounded, while no such engine is healthy; goes to another one when one cannot be reached.

        Raises:
            EngineRejected: the engine answered with an error.
            EngineUnavailable: none could take it in time.
        """

    def lost(self, engine_id: str, wanted: RouteKey) -> None:
        """It has just said that it does not have this version: send it none such until it may have caught up."""

    def has(self, policy: str, version: int) -> bool:
        """Whether some engine that takes requests has this version."""

    def healthy(self) -> frozenset[str]:
        """The ids of the engines that answer."""


class Readiness(Protocol):
    async def problems(self) -> list[str]:
        """Why this gateway should get no traffic now, one line each; empty when it should."""


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
