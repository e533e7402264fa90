"""What nobody took care of, in memory, over a fake judgement store and its turns."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from clawloop.core.contracts.sessions import FeedbackGiven, SessionFacts, SessionState, TurnRecorded
from clawloop.core.contracts.turns import StoredTurn, TurnKind
from clawloop.core.ids import FeedbackId, SessionId, TurnId
from tests.fakes.judgement_store import FakeJudgementStore
from tests.fakes.turn_facts import facts, is_older
from tests.fakes.turn_store import FakeTurnStore


class FakeSweepStore:
    """Satisfies `activities.sweep.SweepStore`."""

    def __init__(self, turns: FakeTurnStore, judged: FakeJudgementStore) -> None:
        self._turns = turns
        self._judged = judged
        self._told: set[FeedbackId] = set()

    async def pending_turns(
        self, age: timedelta, limit: int, excluding: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, TurnRecorded]]:
        missed = [
            turn
            for turn in await self._turns.all()
            if turn.announced_at is None and turn.record.kind is TurnKind.MAIN and is_older(turn, age)
            if turn.session_id not in excluding
        ]
        return [
            (facts(turn), TurnRecorded(turn.record.turn_id, turn.record.version, turn.record.ends_session))
            for turn in missed[:limit]
        ]

    async def pending_feedback(
        self, age: timedelta, limit: int, excluding: Sequence[SessionId] = ()
    ) -> list[tuple[SessionFacts, FeedbackGiven]]:
        untold = [
            given
            for given in self._judged.given
            if not given.applied and given.id not in self._told and datetime.now(UTC) - given.received_at >= age
        ]
        found: list[tuple[SessionFacts, FeedbackGiven]] = []
        for given in untold:
            stored = await self._turns.load(given.turn_id)
            assert stored is not None
            if stored.session_id not in excluding:
                found.append((facts(stored), FeedbackGiven(given.id, given.turn_id)))
        return found[:limit]

    async def sessions_left_open(self, age: timedelta, limit: int) -> list[SessionFacts]:
        newest: dict[SessionId, StoredTurn] = {turn.session_id: turn for turn in await self._turns.all()}
        return [
            facts(turn)
            for session, turn in newest.items()
            if (session not in self._judged.closed or self._judged.closed[session].state is not SessionState.CLOSED)
            and is_older(turn, age)
        ][:limit]

    async def mark_notified(self, turn_ids: Sequence[TurnId], ago: timedelta) -> None:
        await self._turns.mark_notified(turn_ids, ago)

    async def mark_feedback_notified(self, feedback_ids: Sequence[FeedbackId], ago: timedelta) -> None:
        self._told.update(feedback_ids)

    async def merge_stored_bytes(self) -> int:
        return 0
