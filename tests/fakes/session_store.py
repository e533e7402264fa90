"""Sessions and feedback in memory, over the turns of a fake turn store; nothing here judges."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from clawloop.core.contracts.sessions import (
    FeedbackAnswer,
    FeedbackEffect,
    FeedbackGiven,
    RepeatableRequest,
    SessionFacts,
    SessionState,
    StoredFeedback,
)
from clawloop.core.contracts.turns import CALLS_TOOLS, StoredTurn, TurnKind, TurnOutcome, TurnRecord
from clawloop.core.contracts.views import (
    Exchange,
    FeedbackView,
    Judged,
    LessonShown,
    SessionFilter,
    SessionView,
    Tokens,
    TurnDetail,
    TurnView,
)
from clawloop.core.errors import AlreadyAnswered, NotFound
from clawloop.core.ids import ApiKeyId, FeedbackId, SessionId, TurnId, new_feedback_id, short_form
from clawloop.core.judging.plan import RejudgeFacts
from clawloop.core.turns.canonical import response_digest
from clawloop.core.turns.explain import Waiting, explain
from clawloop.core.turns.titles import title_of
from tests.fakes.turn_store import FakeTurnStore


class FakeSessionStore:
    """Satisfies `clawloop.operations.reading.SessionStore`, `api.stores.FeedbackStore` and
    `clawloop.operations.sessions.RejudgeStore`."""

    def __init__(self, turns: FakeTurnStore) -> None:
        self._turns = turns
        self.given: list[tuple[TurnId, float | None, str | None]] = []
        self.feedback: list[FeedbackView] = []
        self.outcomes: list[tuple[str, int]] = []
        self.announced: list[FeedbackId] = []
        self.answers: dict[tuple[ApiKeyId, bytes], FeedbackAnswer] = {}

    async def newest_session(self) -> SessionId | None:
        newest = await self.sessions(SessionFilter(), after=None, limit=1)
        return newest[0].id if newest else None

    async def sessions_between(self, first: UUID, last: UUID, limit: int) -> list[SessionId]:
        return [session for session in sorted(await self._by_session()) if first <= session <= last][:limit]

    async def sessions_named(self, name: str, limit: int) -> list[SessionId]:
        views = await self.sessions(SessionFilter(), after=None, limit=10**6)
        return [view.id for view in views if view.external_id == name][:limit]

    async def newest_turn(self) -> TurnId | None:
        main = [turn.record.turn_id for turn in await self._turns.all() if turn.record.kind is TurnKind.MAIN]
        return max(main, default=None)

    async def turns_between(self, first: UUID, last: UUID, limit: int) -> list[TurnId]:
        ids = [turn.record.turn_id for turn in await self._turns.all()]
        return [turn_id for turn_id in ids if first <= turn_id <= last][:limit]

    async def turn_numbered(self, session: SessionId, number: int) -> TurnId | None:
        return next((view.id for view in await self.turns(session) if view.number == number), None)

    async def session_of(self, turn: TurnId) -> SessionId | None:
        stored = await self._turns.load(turn)
        return None if stored is None else stored.session_id

    async def sessions(self, wanted: SessionFilter, *, after: SessionId | None, limit: int) -> list[SessionView]:
        """Of what is said of turns it knows the kind alone."""
        policy = wanted.policy
        known = {"default", *(turn.record.policy for turn in await self._turns.all())}
        if policy is not None and policy not in known:
            raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy")
        views = await self._matching(policy, wanted.state)
        if wanted.kind is not None:
            views = [view for view in views if (view.main_turns if wanted.kind is TurnKind.MAIN else view.side_turns)]
        elif wanted.fold:
            views = [view for view in views if not _is_folded(view)]
        views.sort(key=lambda view: (view.last_turn_at, view.id), reverse=True)
        begin = 0 if after is None else next((n + 1 for n, view in enumerate(views) if view.id == after), len(views))
        return views[begin : begin + limit]

    async def count_sessions(self, *, policy: str | None, state: SessionState | None) -> tuple[int, int]:
        views = await self._matching(policy, state)
        return len(views), sum(map(_is_folded, views))

    async def _matching(self, policy: str | None, state: SessionState | None) -> list[SessionView]:
        grouped = await self._by_session()
        views = [self._view(own, grouped) for own in grouped.values()]
        return [view for view in views if policy in (None, view.policy) and state in (None, view.state)]

    async def session(self, session: SessionId) -> SessionView | None:
        grouped = await self._by_session()
        return self._view(grouped[session], grouped) if session in grouped else None

    async def turns(
        self, session: SessionId, *, before: TurnId | None = None, limit: int | None = None
    ) -> list[TurnView]:
        own = (await self._by_session()).get(session, [])
        everything = [turn.record.turn_id for turn in await self._turns.all()]
        main = [turn.record.turn_id for turn in own if turn.record.kind is TurnKind.MAIN]
        views = [
            TurnView(
                id=turn.record.turn_id,
                short_id=short_form(turn.record.turn_id, *(one for one in everything if one != turn.record.turn_id)),
                session_id=turn.session_id,
                parent_turn_id=turn.parent_turn_id,
                matched_by=turn.matched_by,
                number=main.index(turn.record.turn_id) + 1 if turn.record.turn_id in main else None,
                kind=turn.record.kind,
                kind_reason=turn.record.kind_reason,
                status=turn.record.status,
                error=turn.record.error,
                version=turn.record.version,
                outcome=turn.outcome,
                why=explain(
                    turn.outcome,
                    turn.outcome_detail,
                    turn.record.status,
                    Waiting(
                        notified=turn.announced_at is not None,
                        has_follow_up=any(other.parent_turn_id == turn.record.turn_id for other in own),
                        session_open=not own[-1].record.ends_session,
                        in_episode=turn.record.episode_id is not None,
                    ),
                ),
                verdict=None,
                expected=None,
                votes=0,
                hints=(),
                sample=None,
                reward=None,
                step=None,
                tokens=None if turn.record.response_ids is None else len(turn.record.response_ids),
                being_judged=False,
                episode_id=turn.record.episode_id,
                started_at=turn.record.started_at,
                announced_at=turn.announced_at,
                lessons=LessonShown.of(turn.record.lessons),
            )
            for turn in own
            if before is None or turn.record.turn_id < before
        ]
        return views if limit is None else views[-limit:]

    async def turns_from(self, session: SessionId, first: int, limit: int) -> list[TurnView]:
        return (await self.turns(session))[first : first + limit]

    async def position(self, session: SessionId, turn: TurnId) -> int:
        return sum(view.id < turn for view in await self.turns(session))

    async def session_of_client(self, key: ApiKeyId, name: str) -> SessionId | None:
        views = await self.sessions(SessionFilter(), after=None, limit=10**6)
        return next((view.id for view in views if view.external_id == name and view.key_id == key), None)

    async def turn(self, turn: TurnId) -> TurnView | None:
        session = await self.session_of(turn)
        views = [] if session is None else await self.turns(session)
        return next((view for view in views if view.id == turn), None)

    async def exchanges(self, turns: Sequence[TurnId]) -> list[Exchange]:
        return [await self._exchange(turn) for turn in turns]

    async def _exchange(self, turn: TurnId) -> Exchange:
        stored = await self._turns.load(turn)
        assert stored is not None
        messages, begin = stored.record.messages, 0
        parent = None if stored.parent_turn_id is None else await self._turns.load(stored.parent_turn_id)
        if parent is not None and parent.record.response is not None:
            digest = response_digest(parent.record.response)
            begin = max(n + 1 for n, message in enumerate(messages) if response_digest(message) == digest)
        return Exchange(
            turn_id=turn,
            said=messages[begin:],
            repeated=begin,
            reply=stored.record.response,
            judged=Judged(feedback=[view for view in self.feedback if view.turn_id == turn]),
        )

    async def detail(self, turn: TurnId, *, tokens: bool) -> TurnDetail | None:
        view, stored = await self.turn(turn), await self._turns.load(turn)
        if view is None or stored is None:
            return None
        record = stored.record
        return TurnDetail(
            turn=view,
            asked_for=record.alias,
            engine_id=record.engine_id,
            finish_reason=record.finish_reason,
            finished_at=record.finished_at,
            messages=record.messages,
            tools=record.tools,
            response=record.response,
            sampling=record.sampling,
            judged=(await self._exchange(turn)).judged,
            sample=None,
            tokens=Tokens(prompt_ids=record.prompt_ids, response_ids=record.response_ids, logprobs=record.logprobs)
            if tokens
            else None,
        )

    async def given_on(self, key: ApiKeyId, turn: TurnId) -> list[FeedbackView] | None:
        stored = await self._turns.load(turn)
        if stored is None or stored.record.api_key_id != key or stored.record.kind is not TurnKind.MAIN:
            return None
        return [view for view in self.feedback if view.turn_id == turn]

    async def turn_of(self, key: ApiKeyId, policy: str, session: str | None, number: int | None) -> TurnId | None:
        main: list[TurnRecord] = []
        for own in (await self._by_session()).values():
            named = own[0].record.policy == policy and session in {None, *(turn.record.evidence.value for turn in own)}
            if own[0].record.api_key_id == key and (named or session == str(own[0].session_id)):
                main += [turn.record for turn in own if turn.record.kind is TurnKind.MAIN]
        if number is None:
            answers = [turn.turn_id for turn in main if turn.finish_reason != CALLS_TOOLS]
            return max(answers or [turn.turn_id for turn in main], default=None)
        return main[number - 1].turn_id if number <= len(main) else None

    async def give(
        self,
        key: ApiKeyId,
        turn: TurnId,
        score: float | None,
        text: str | None,
        request: RepeatableRequest | None = None,
    ) -> StoredFeedback | None:
        stored = await self._turns.load(turn)
        if stored is None or stored.record.api_key_id != key or stored.record.kind is not TurnKind.MAIN:
            return None
        if stored.outcome is TurnOutcome.ERASED or stored.record.episode_id is not None:
            return None
        record = stored.record
        facts = SessionFacts(
            stored.session_id, record.policy, record.evidence.source, record.started_at, record.version
        )
        fixed = stored.outcome is TurnOutcome.NOT_TRAINABLE
        effect = FeedbackEffect.RECORDED if fixed else FeedbackEffect.AMENDS
        given = FeedbackGiven(new_feedback_id(), turn)
        self._remember(key, request, effect, given.feedback_id)
        self.given.append((turn, score, text))
        self.feedback.append(
            FeedbackView(
                id=given.feedback_id,
                turn_id=turn,
                score=score,
                text=text,
                effect=effect,
                received_at=datetime.now(UTC),
                applied=False,
            )
        )
        return StoredFeedback(given, facts, effect)

    async def give_outcome(
        self, key: ApiKeyId, policy: str, session: str, outcome: int, request: RepeatableRequest | None = None
    ) -> FeedbackEffect | None:
        for own in (await self._by_session()).values():
            first = own[0].record
            is_meant = session == str(own[0].session_id) or (first.policy, first.evidence.value) == (policy, session)
            if first.api_key_id == key and is_meant and first.episode_id is None:
                self._remember(key, request, FeedbackEffect.AMENDS, None)
                self.outcomes.append((session, outcome))
                return FeedbackEffect.AMENDS
        return None

    async def answer_to(self, key: ApiKeyId, request: RepeatableRequest) -> FeedbackAnswer | None:
        return self.answers.get((key, request.key_sha256))

    def _remember(
        self, key: ApiKeyId, request: RepeatableRequest | None, effect: FeedbackEffect, feedback: FeedbackId | None
    ) -> None:
        if request is None:
            return
        if (key, request.key_sha256) in self.answers:
            raise AlreadyAnswered("this Idempotency-Key was used meanwhile")
        self.answers[key, request.key_sha256] = FeedbackAnswer(request.body_sha256, feedback, effect)

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

    async def mark_feedback_notified(self, feedback: FeedbackId, ago: timedelta) -> None:
        self.announced.append(feedback)

    async def _by_session(self) -> dict[SessionId, list[StoredTurn]]:
        grouped: dict[SessionId, list[StoredTurn]] = {}
        for record in sorted(self._turns.records, key=lambda record: record.turn_id):
            stored = await self._turns.load(record.turn_id)
            assert stored is not None
            grouped.setdefault(stored.session_id, []).append(stored)
        return grouped

    def _view(self, own: list[StoredTurn], grouped: dict[SessionId, list[StoredTurn]]) -> SessionView:
        newest = max(own, key=lambda turn: turn.record.started_at).record
        first = own[0].record
        main = [turn for turn in own if turn.record.kind is TurnKind.MAIN]
        return SessionView(
            id=own[0].session_id,
            short_id=short_form(own[0].session_id, *(other for other in grouped if other != own[0].session_id)),
            policy=first.policy,
            title=title_of((main or own)[0].record.messages),
            erased=False,
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
            praised=0,
            blamed=0,
            first_version=min(turn.record.version for turn in own),
            last_version=max(turn.record.version for turn in own),
            task_outcome=None,
            key_id=first.api_key_id,
            episode_id=first.episode_id,
        )


def _is_folded(view: SessionView) -> bool:
    return view.main_turns == 0 or (view.main_turns == 1 and view.state is SessionState.CLOSED)
