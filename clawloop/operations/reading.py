"""Sessions, turns and episodes as people find and read them, by what they type or what was said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar
from uuid import UUID

from clawloop.core.contracts.sessions import SessionState
from clawloop.core.contracts.views import (
    Exchange,
    SessionDetail,
    SessionFilter,
    SessionPage,
    SessionView,
    TurnDetail,
    TurnView,
)
from clawloop.core.errors import AmbiguousId, NotFound
from clawloop.core.ids import ApiKeyId, SessionId, TurnId, ids_beginning, short_form, without_kind
from clawloop.operations.workflow_links import NO_LINKS, WorkflowLinks

# References -----------------------------------------------------------------------------------------------------------
# Finds sessions, turns and episodes by what people type: an id or its beginning, a client's own name, a reply's id,
# `last`, or `SESSION:N` for the n-th main turn of a session.

Id = TypeVar("Id", bound=UUID)

LAST = "last"
# A position among a session's turns is a PostgreSQL integer.
_LARGEST = 2**31 - 1
# Several are named in the error, and more would not help.
SEVERAL = 4


class SessionStore(Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time."""

    async def newest_session(self) -> SessionId | None:
        """The session with the newest turn."""

    async def sessions_between(self, first: UUID, last: UUID, limit: int) -> list[SessionId]:
        """Sessions by id, both ends included."""

    async def sessions_named(self, name: str, limit: int) -> list[SessionId]:
        """Sessions with this value of their client, newest first."""

    async def newest_turn(self) -> TurnId | None:
        """The newest main turn."""

    async def turns_between(self, first: UUID, last: UUID, limit: int) -> list[TurnId]:
        """Turns by id, both ends included."""

    async def turn_numbered(self, session: SessionId, number: int) -> TurnId | None:
        """The n-th main turn of a session, from 1."""

    async def session_of(self, turn: TurnId) -> SessionId | None:
        """The session of a turn; None if there is no such turn."""

    async def sessions(self, wanted: SessionFilter, *, after: SessionId | None, limit: int) -> list[SessionView]:
        """Sessions that fit, the one with the newest turn first; `after` is the last session of the previous page.

        An unknown `after` gives an empty page.

        Raises:
            NotFound: there is no such policy.
            StateConflict: text is searched for, and content is encrypted.
        """

    async def count_sessions(self, *, policy: str | None, state: SessionState | None) -> tuple[int, int]:
        """Number of sessions that match, and number of those that `fold` leaves out."""

    async def session_of_client(self, key: ApiKeyId, name: str) -> SessionId | None:
        """The newest session of this key that the client gave this name."""

    async def session(self, session: SessionId) -> SessionView | None:
        """The session; None if there is no such session."""

    async def turns(
        self, session: SessionId, *, before: TurnId | None = None, limit: int | None = None
    ) -> list[TurnView]:
        """Turns of a session in order, each with its outcome: the newest `limit`, of those older than `before`."""

    async def turns_from(self, session: SessionId, first: int, limit: int) -> list[TurnView]:
        """Turns of a session in order, from position `first`."""

    async def position(self, session: SessionId, turn: TurnId) -> int:
        """Number of turns of the session that are older than this one."""

    async def turn(self, turn: TurnId) -> TurnView | None: ...

    async def exchanges(self, turns: Sequence[TurnId]) -> list[Exchange]:
        """Messages, reply and verdict that each of these turns added to their session, in the turns' order."""

    async def detail(self, turn: TurnId, *, tokens: bool) -> TurnDetail | None:
        """All that is stored of a turn."""


class References:
    """Every method raises NotFound, AmbiguousId and StoreUnavailable."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store

    async def session(self, reference: str) -> SessionId:
        """The session that is meant."""
        found = await self._sessions(reference)
        if not found and (turns := await self._turns(reference)):
            session = await self._store.session_of(_one(turns, reference, "turns", "turn"))
            found = [] if session is None else [session]
        if not found and reference == LAST:
            raise NotFound("There is no session yet: nobody has chatted.", code="not_found", field="session")
        if not found:
            raise NotFound(
                f"There is no session {reference!r}. Give its id or the beginning of it, the client's own id, the id of"
                " a reply, or `last`; `clawloop session list` shows them.",
                code="not_found",
                field="session",
            )
        return _one(found, reference, "sessions", "session")

    async def turn(self, reference: str) -> TurnId:
        """The turn that is meant."""
        found = await self._turns(reference)
        if not found and ":" in reference:
            name, _, number = reference.rpartition(":")
            if number.isascii() and number.isdigit() and 0 < int(number[:11]) <= _LARGEST:
                turn = await self._store.turn_numbered(await self.session(name), int(number[:11]))
                found = [] if turn is None else [turn]
        if not found and reference == LAST:
            raise NotFound("There is no reply yet: nobody has chatted.", code="not_found", field="turn")
        if not found:
            raise NotFound(
                f"There is no turn {reference!r}. Give its id or the beginning of it, the id of the reply (chatcmpl-…),"
                " SESSION:N for the n-th main turn of a session, or `last`; `clawloop session show` shows them.",
                code="not_found",
                field="turn",
            )
        return _one(found, reference, "turns", "turn")

    async def _sessions(self, reference: str) -> Sequence[SessionId]:
        if reference == LAST:
            newest = await self._store.newest_session()
            return [] if newest is None else [newest]
        span = ids_beginning(reference)
        # A whole id first: a client may have given its session the id of another one as its name.
        if span is not None and span[0] == span[1] and (own := await self._store.sessions_between(*span, 1)):
            return own
        if named := await self._store.sessions_named(reference, SEVERAL):
            return named
        return [] if span is None else await self._store.sessions_between(*span, SEVERAL)

    async def _turns(self, reference: str) -> Sequence[TurnId]:
        if reference == LAST:
            newest = await self._store.newest_turn()
            return [] if newest is None else [newest]
        span = ids_beginning(without_kind(reference))
        return [] if span is None else await self._store.turns_between(*span, SEVERAL)


def _one(found: Sequence[Id], reference: str, several: str, field: str) -> Id:
    if len(found) == 1:
        return found[0]
    others = sorted(found)
    shown = [short_form(own, *(other for other in others if other != own)) for own in others[: SEVERAL - 1]]
    more = ", …" if len(others) >= SEVERAL else ""
    raise AmbiguousId(
        f"{reference!r} may be several {several}: {', '.join(shown)}{more}. Give one of them.", field=field
    )


# Reading --------------------------------------------------------------------------------------------------------------
# Sessions and turns as people read them; the page, the API and the command line ask here.

# A page of turns with their text stays below a few megabytes; the next page is one request away.
MOST_TURNS = 500
MOST_SESSIONS = 500


class Reading:
    """Every method raises NotFound, AmbiguousId and StoreUnavailable."""

    def __init__(self, store: SessionStore, links: WorkflowLinks = NO_LINKS) -> None:
        self._store = store
        self._links = links
        self.references = References(store)

    async def page(self, wanted: SessionFilter, *, after: str | None = None, limit: int = 50) -> SessionPage:
        """Sessions that fit, the one with the newest turn first."""
        last = None if after is None else await self.references.session(after)
        # One more than the page holds shows whether there is another page.
        found = await self._store.sessions(wanted, after=last, limit=limit + 1)
        page = found[:limit]
        following = page[-1].id if len(found) > limit else None
        if wanted.of_turns:  # a search does not read all of them to count them
            return SessionPage(sessions=page, total=None, folded=0, next=following)
        total, folded = await self._store.count_sessions(policy=wanted.policy, state=wanted.state)
        return SessionPage(
            sessions=page,
            total=total - folded if wanted.fold else total,
            folded=folded if wanted.fold else 0,
            next=following,
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
        session = await self._session(session_id)
        found = await self._store.turns(session_id, before=end, limit=limit + 1)
        turns = found[-limit:]
        return SessionDetail(
            session=session,
            turns=turns,
            earlier=turns[0].id if len(found) > limit else None,
            conversation=await self._store.exchanges([turn.id for turn in turns]) if content else None,
        )

    async def session_from(self, session_id: SessionId, first: int, limit: int) -> SessionDetail:
        """A session with its turns from a position on, and what was said."""
        session = await self._session(session_id)
        turns = await self._store.turns_from(session_id, first, limit)
        return SessionDetail(
            session=session,
            turns=turns,
            earlier=turns[0].id if turns and first > 0 else None,
            conversation=await self._store.exchanges([turn.id for turn in turns]),
        )

    async def position(self, session: SessionId, turn: TurnId) -> int:
        """Number of turns of the session that are older than this one."""
        return await self._store.position(session, turn)

    async def session_of_client(self, key: ApiKeyId, name: str) -> SessionId | None:
        """The newest session of this key that the client gave this name."""
        return await self._store.session_of_client(key, name)

    async def exchange(self, reference: str) -> tuple[TurnView, Exchange]:
        """A turn with the messages that it added to its session."""
        view = await self.turn(reference)
        (exchange,) = await self._store.exchanges([view.id])
        return view, exchange

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

    async def _session(self, session_id: SessionId) -> SessionView:
        session = await self._store.session(session_id)
        if session is None:
            raise NotFound(f"There is no session {session_id}.", code="not_found", field="session")
        return session.model_copy(update={"workflow_url": self._links.of(session.workflow_id)})
