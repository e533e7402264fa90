"""What the page reads while PostgreSQL is away; its tests with PostgreSQL are in tests/ui."""

from __future__ import annotations

from typing import NoReturn

from clawloop.core.contracts.answers import (
    Counts,
    PolicyEvent,
    ReplyFigures,
    TrainedReply,
)
from clawloop.core.errors import StoreUnavailable


class AwayBrowser:
    """Satisfies `clawloop.operations.training.TrainingBrowser`; every call raises StoreUnavailable."""

    async def batch(self, policy: str, step: int, limit: int | None = None) -> list[TrainedReply]:
        _fail()

    async def events(self, policy: str, limit: int) -> list[PolicyEvent]:
        _fail()

    async def replies(self, policy: str, limit: int) -> list[ReplyFigures]:
        _fail()

    async def base_replies(self, policy: str, limit: int) -> list[ReplyFigures]:
        _fail()

    async def counts(self, policy: str) -> Counts:
        _fail()

    async def mark(self) -> str:
        _fail()


def _fail() -> NoReturn:
    raise StoreUnavailable("the fake is away")
