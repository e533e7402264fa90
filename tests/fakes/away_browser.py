"""What the page reads while PostgreSQL is away; its tests with PostgreSQL are in tests/ui."""

from __future__ import annotations

from typing import NoReturn

from clawloop.contracts.browsing import (
    ChatPage,
    ChatTurn,
    Counts,
    PolicyEvent,
    ReplyFigures,
    SessionFilter,
    SessionSummary,
    TrainedReply,
)
from clawloop.errors import StoreUnavailable
from clawloop.ids import ApiKeyId, SessionId, TurnId


class AwayBrowser:
    """Satisfies `api.ports.SessionBrowser` and `api.ports.TrainingBrowser`; every call raises StoreUnavailable."""

    async def search(self, wanted: SessionFilter, after: SessionId | None, limit: int) -> list[SessionSummary]:
        _fail()

    async def chat(self, session: SessionId, first: int, limit: int) -> ChatPage | None:
        _fail()

    async def turn(self, turn: TurnId) -> tuple[ChatTurn, ApiKeyId] | None:
        _fail()

    async def position(self, session: SessionId, turn: TurnId) -> int:
        _fail()

    async def session_named(self, key: ApiKeyId, name: str) -> SessionId | None:
        _fail()

    async def batch(self, policy: str, step: int) -> list[TrainedReply]:
        _fail()

    async def events(self, policy: str, limit: int) -> list[PolicyEvent]:
        _fail()

    async def replies(self, policy: str, limit: int) -> list[ReplyFigures]:
        _fail()

    async def counts(self, policy: str) -> Counts:
        _fail()

    async def mark(self) -> str:
        _fail()


def _fail() -> NoReturn:
    raise StoreUnavailable("the fake is away")
