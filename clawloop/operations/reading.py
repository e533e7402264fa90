"""Sessions and turns as people read them; the page, the API and the command line ask here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.views import Exchange, SessionDetail, SessionPage, SessionView, TurnDetail, TurnView
from clawloop.errors import NotFound
from clawloop.ids import SessionId, TurnId
from clawloop.operations.references import References, ReferenceStore
from clawloop.operations.workflow_links import NO_LINKS, WorkflowLinks

# A page of turns with their text stays below a few megabytes; the next page is one request away.
MOST_TURNS = 500
MOST_SESSIONS = 500


class SessionStore(ReferenceStore, Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    async def sessions(
        self,
        *,
        policy: str | None,
        state: SessionState | None,
        after: SessionId | None,
        limit: int,
        fold: bool = False,
    ) -> list[SessionView]:
        """Sessions, the one with the newest turn first; `after` is the last session of the previous page.

        An unknown `after` gives an empty page.

        Args:
            fold: leave out sessions without a main turn, and closed ones with a single one.

        Raises:
            NotFound: there is no such policy.
        """

    async def count_sessions(self, *, policy: str | None, state: SessionState | None) -> tuple[int, int]:
        """Number of sessions that match, and number of those that `fold` leaves out."""

    async def session(self, session: SessionId) -> SessionView | None:
        """The session; None if there is no such session."""

    async def turns(
        self, session: SessionId, *, before: TurnId | None = None, limit: int | None = None
    ) -> list[TurnView]:
        """Turns of a session in order, each with its outcome: the newest `limit`, of those older than `before`."""

    async def turn(self, turn: TurnId) -> TurnView | None: ...

    async def exchanges(self, turns: Sequence[TurnId]) -> list[Exchange]:
        """Messages, reply and verdict that each of these turns added to their session, in the turns' order."""

    async def detail(self, turn: TurnId, *, tokens: bool) -> TurnDetail | None:
        """All that is stored of a turn."""


class Reading:
    """Every method raises NotFound, AmbiguousId and StoreUnavailable."""

    def __init__(self, store: SessionStore, links: WorkflowLinks = NO_LINKS) -> None:
        self._store = store
        self._links = links
        self.references = References(store)

    async def page(
        self,
        *,
        policy: str | None = None,
        state: SessionState | None = None,
        after: str | None = None,
        limit: int = 50,
        fold: bool = False,
    ) -> SessionPage:
        """Sessions, the one with the newest turn first."""
        last = None if after is None else await self.references.session(after)
        # One more than the page holds shows whether there is another page.
        found = await self._store.sessions(policy=policy, state=state, after=last, limit=limit + 1, fold=fold)
        total, folded = await self._store.count_sessions(policy=policy, state=state)
        page = found[:limit]
        return SessionPage(
            sessions=page,
            total=total - folded if fold else total,
            folded=folded if fold else 0,
            next=page[-1].id if len(found) > limit else None,
        )

    async def session(
        self, reference: str, *, before: str | None = None, limit: int = MOST_TURNS, content: bool = False
    ) -> SessionDetail:
        """A session with its newest turns, or those before one of them.

        Args:
            content: also what was said, and the judges' answers.
        """
        session_id = await self.references.session(reference)
        end = None if before is None else await self.references.turn(before)
        session = await self._store.session(session_id)
        found = await self._store.turns(session_id, before=end, limit=limit + 1)
        if session is None:  # nothing deletes sessions: an id was found a moment ago
            raise NotFound(f"There is no session {reference!r}.", code="not_found", field="session")
        turns = found[-limit:]
        return SessionDetail(
            session=session.model_copy(update={"workflow_url": self._links.of(session.workflow_id)}),
            turns=turns,
            earlier=turns[0].id if len(found) > limit else None,
            conversation=await self._store.exchanges([turn.id for turn in turns]) if content else None,
        )

    async def turn(self, reference: str) -> TurnView:
        """A turn with its outcome and the reason."""
        turn_id = await self.references.turn(reference)
        view = await self._store.turn(turn_id)
        if view is None:
            raise NotFound(f"There is no turn {reference!r}.", code="not_found", field="turn")
        return view.model_copy(update={"workflow_url": self._links.of(f"session/{view.session_id}")})

    async def detail(self, reference: str, *, tokens: bool = False) -> TurnDetail:
        """All that is stored of a turn.

        Args:
            tokens: also token ids and log-probs.
        """
        turn_id = await self.references.turn(reference)
        detail = await self._store.detail(turn_id, tokens=tokens)
        if detail is None:
            raise NotFound(f"There is no turn {reference!r}.", code="not_found", field="turn")
        return detail
