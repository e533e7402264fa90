"""Sessions and feedback in memory, over the turns of a fake turn store; nothing here judges."""

from __future__ import annotations

from clawloop.contracts.sessions import FeedbackEffect, FeedbackGiven, SessionFacts, SessionState, StoredFeedback
from clawloop.contracts.turns import StoredTurn, TurnKind, TurnOutcome
from clawloop.contracts.views import SessionView, TurnView
from clawloop.ids import ApiKeyId, FeedbackId, SessionId, TurnId, new_feedback_id
from clawloop.judging.rejudging import RejudgeFacts
from tests.fakes.turn_store import FakeTurnStore


class FakeSessionStore:
    """Satisfies `api.ports.SessionStore`, `api.ports.FeedbackStore` and `clawloop.operations.ports.RejudgeStore`."""

    def __init__(self, turns: FakeTurnStore) -> None:
        self._turns = turns
        self.given: list[tuple[TurnId, float | None, str | None]] = []
        self.outcomes: list[tuple[str, int]] = []
        self.announced: list[FeedbackId] = []

    async def sessions(
        self, *, policy: str | None, state: SessionState | None, after: SessionId | None, limit: int
    ) -> list[SessionView]:
        views = [self._view(own) for own in (await self._by_session()).values()]
        views = [view for view in views if policy in (None, view.policy) and state in (None, view.state)]
        views.sort(key=lambda view: (view.last_turn_at, view.id), reverse=True)
        begin = 0 if after is None else next((n + 1 for n, view in enumerate(views) if view.id == after), len(views))
        return views[begin : begin + limit]

    async def session(self, session: SessionId) -> SessionView | None:
        own = (await self._by_session()).get(session)
        return None if own is None else self._view(own)

    async def turns(self, session: SessionId) -> list[TurnView]:
        own = (await self._by_session()).get(session, [])
        main = [turn.record.turn_id for turn in own if turn.record.kind is TurnKind.MAIN]
        return [
            TurnView(
                id=turn.record.turn_id,
                session_id=turn.session_id,
                parent_turn_id=turn.parent_turn_id,
                number=main.index(turn.record.turn_id) + 1 if turn.record.turn_id in main else None,
                kind=turn.record.kind,
                kind_reason=turn.record.kind_reason,
                status=turn.record.status,
                error=turn.record.error,
                version=turn.record.version,
                outcome=turn.outcome,
                why=turn.outcome_detail,
                verdict=None,
                expected=None,
                votes=0,
                hint=None,
                sample=None,
                reward=None,
                step=None,
                started_at=turn.record.started_at,
                announced_at=turn.announced_at,
            )
            for turn in own
        ]

    async def turn_of(self, key: ApiKeyId, session: str | None, number: int | None) -> TurnId | None:
        main: list[TurnId] = []
        for own in (await self._by_session()).values():
            names = {None, str(own[0].session_id), *(turn.record.evidence.value for turn in own)}
            if own[0].record.api_key_id == key and session in names:
                main += [turn.record.turn_id for turn in own if turn.record.kind is TurnKind.MAIN]
        if number is None:
            return max(main, default=None)
        return main[number - 1] if number <= len(main) else None

    async def give(self, key: ApiKeyId, turn: TurnId, score: float | None, text: str | None) -> StoredFeedback | None:
        stored = await self._turns.load(turn)
        if stored is None or stored.record.api_key_id != key or stored.record.kind is not TurnKind.MAIN:
            return None
        if stored.outcome is TurnOutcome.ERASED:
            return None
        self.given.append((turn, score, text))
        record = stored.record
        facts = SessionFacts(
            stored.session_id, record.policy, record.evidence.source, record.started_at, record.version
        )
        fixed = stored.outcome is TurnOutcome.NOT_TRAINABLE
        effect = FeedbackEffect.RECORDED if fixed else FeedbackEffect.AMENDS
        return StoredFeedback(FeedbackGiven(new_feedback_id(), turn), facts, effect)

    async def give_outcome(self, key: ApiKeyId, session: str, outcome: int) -> FeedbackEffect | None:
        for own in (await self._by_session()).values():
            named = own[0].record.evidence.value, str(own[0].session_id)
            if own[0].record.api_key_id == key and session in named:
                self.outcomes.append((session, outcome))
                return FeedbackEffect.AMENDS
        return None

    async def rejudge_facts(self, turn_id: TurnId) -> RejudgeFacts | None:
        stored = await self._turns.load(turn_id)
        if stored is None:
            return None
        record = stored.record
        facts = SessionFacts(
            stored.session_id, record.policy, record.evidence.source, record.started_at, record.version
        )
        replied = record.response is not None
        followed = any(turn.parent_turn_id == turn_id for turn in await self._turns.all())
        has_follow_up = followed or any(given == turn_id for given, *_ in self.given)
        return RejudgeFacts(turn_id, facts, record.kind, stored.outcome, replied, None, 0, has_follow_up)

    async def of_session(self, session: SessionId) -> list[RejudgeFacts]:
        turns = [turn.record for turn in await self._turns.all() if turn.session_id == session]
        main = sorted(record.turn_id for record in turns if record.kind is TurnKind.MAIN)
        return [facts for turn_id in main if (facts := await self.rejudge_facts(turn_id)) is not None]

    async def unjudged(self, limit: int) -> list[RejudgeFacts]:
        turns = [turn for turn in await self._turns.all() if turn.outcome is TurnOutcome.UNJUDGED]
        ids = sorted(turn.record.turn_id for turn in turns)[:limit]
        return [facts for turn_id in ids if (facts := await self.rejudge_facts(turn_id)) is not None]

    async def mark_feedback_notified(self, feedback: FeedbackId) -> None:
        self.announced.append(feedback)

    async def _by_session(self) -> dict[SessionId, list[StoredTurn]]:
        grouped: dict[SessionId, list[StoredTurn]] = {}
        for record in sorted(self._turns.records, key=lambda record: record.turn_id):
            stored = await self._turns.load(record.turn_id)
            assert stored is not None
            grouped.setdefault(stored.session_id, []).append(stored)
        return grouped

    def _view(self, own: list[StoredTurn]) -> SessionView:
        newest = max(own, key=lambda turn: turn.record.started_at).record
        first = own[0].record
        main = [turn for turn in own if turn.record.kind is TurnKind.MAIN]
        return SessionView(
            id=own[0].session_id,
            policy=first.policy,
            external_id=first.evidence.value,
            identified_by=first.evidence.source,
            state=SessionState.ENDING if newest.ends_session else SessionState.OPEN,
            main_turns=len(main),
            side_turns=len(own) - len(main),
            waiting=sum(turn.outcome is TurnOutcome.WAITING for turn in own),
            sampled=0,
            created_at=first.started_at,
            last_turn_at=newest.started_at,
            closed_at=None,
            closed_why=None,
            guarantee=None,
        )
