"""Finds sessions, turns and episodes by what people type: an id or its beginning, a client's own name, a reply's id,
`last`, or `SESSION:N` for the n-th main turn of a session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar
from uuid import UUID

from clawloop.errors import AmbiguousId, NotFound
from clawloop.ids import SessionId, TurnId, ids_beginning, short_form, without_kind

Id = TypeVar("Id", bound=UUID)

LAST = "last"
# A position among a session's turns is a PostgreSQL integer.
_LARGEST = 2**31 - 1
# Several are named in the error, and more would not help.
SEVERAL = 4


class ReferenceStore(Protocol):
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


class References:
    """Every method raises NotFound, AmbiguousId and StoreUnavailable."""

    def __init__(self, store: ReferenceStore) -> None:
        self._store = store

    async def session(self, reference: str) -> SessionId:
        """The session that is meant."""
        found = await self._sessions(reference)
        if not found and (turns := await self._turns(reference)):
            session = await self._store.session_of(_one(turns, reference, "turns", "turn"))
            found = [] if session is None else [session]
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
