"""Turns of the fake store for export, without judgements, samples and steps."""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from clawloop.core.ids import SessionId
from clawloop.operations.export import ExportedTurn, ExportFilter, Record
from tests.fakes.turn_store import FakeTurnStore


class FakeExportStore:
    """Satisfies `clawloop.operations.export.ExportStore`."""

    def __init__(self, turns: FakeTurnStore) -> None:
        self._turns = turns

    async def has_policy(self, policy: str) -> bool:
        return policy == "default"

    async def turns(
        self, wanted: ExportFilter, after: UUID | None, limit: int, *, judged: bool
    ) -> tuple[list[ExportedTurn], UUID | None]:
        stored = [] if judged else await self._turns.all()
        page = [one for one in stored if after is None or one.record.turn_id > after]
        page = [one for one in page if wanted.session in (None, one.session_id)][:limit]
        found = [
            ExportedTurn(one.record, one.session_id, one.record.evidence.value, 1, one.outcome, [], None)
            for one in page
        ]
        return found, page[-1].record.turn_id if page else None

    async def files(self, session: SessionId, sha256s: Collection[str]) -> dict[str, bytes]:
        return await self._turns.of_session(session, sha256s)

    async def samples(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        return []

    async def lessons(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        return []

    async def steps(self, wanted: ExportFilter, after: UUID | None, limit: int) -> list[Record]:
        return []
