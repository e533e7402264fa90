"""Feedback on turns, and outcomes of sessions' tasks, in PostgreSQL."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from uuid import UUID

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.sessions import (
    FeedbackAnswer,
    FeedbackEffect,
    FeedbackGiven,
    RepeatableRequest,
    SessionFacts,
    SessionState,
    StoredFeedback,
)
from clawloop.core.contracts.training import UNTAKEN
from clawloop.core.contracts.turns import CALLS_TOOLS, TurnKind, TurnOutcome
from clawloop.core.contracts.views import FeedbackView
from clawloop.core.errors import AlreadyAnswered, RecipeRejected
from clawloop.core.ids import ApiKeyId, FeedbackId, SessionId, TurnId, new_feedback_id
from db.content import content_of, storable
from db.database import PostgresStore, transaction
from db.judging.rewards import finalize_outcome_of
from db.recovery import mark_feedback_notified
from db.tables import ApiKeyRow, FeedbackRequestRow, FeedbackRow, JudgementRow, SampleRow, SessionRow, TurnRow
from db.training.policies import lock_policy
from db.training.recipes import recipe_by_hash
from db.training.work_flag import refresh_work_flag
from db.turns.exchanges import read_feedback
from db.turns.stored_bytes import ROW_BYTES, add_stored_bytes

REMEMBERED = timedelta(days=30)
"""Time in which a repeated request gets its first answer; clients and their queues stop retrying long before."""
_MOST_FORGOTTEN = 100  # a request must not wait for the clearing of a backlog


class PostgresFeedbackStore(PostgresStore):
    """Satisfies `api.stores.FeedbackStore`."""

    @transaction
    async def turn_of(
        self, connection: AsyncConnection, key: ApiKeyId, policy: str, session: str | None, number: int | None
    ) -> TurnId | None:
        main = (
            select(TurnRow.id)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .where(SessionRow.api_key_id == key, TurnRow.kind == TurnKind.MAIN)
        )
        main = main.where(SessionRow.policy == policy if session is None else _named(session, policy))
        if number is not None:
            queries = [main.order_by(TurnRow.id).offset(number - 1)]
        else:
            newest = main.order_by(TurnRow.id.desc())
            queries = [newest.where(TurnRow.finish_reason.is_distinct_from(CALLS_TOOLS)), newest]
        for query in queries:
            if (turn_id := await connection.scalar(query.limit(1))) is not None:
                return TurnId(turn_id)
        return None

    @transaction
    async def give(
        self,
        connection: AsyncConnection,
        key: ApiKeyId,
        turn: TurnId,
        score: float | None,
        text: str | None,
        request: RepeatableRequest | None = None,
    ) -> StoredFeedback | None:
        query = (
            select(
                TurnRow.version,
                TurnRow.outcome,
                TurnRow.session_id,
                SessionRow.policy,
                SessionRow.identified_by,
                SessionRow.created_at,
            )
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .where(TurnRow.id == turn, SessionRow.api_key_id == key)
            .where(TurnRow.kind == TurnKind.MAIN, TurnRow.outcome != TurnOutcome.ERASED, TurnRow.episode_id.is_(None))
            # Waits for an erasure of the turn, and sees it.
            .with_for_update(key_share=True, read=True, of=TurnRow)
        )
        row = (await connection.execute(query)).first()
        if row is None:
            return None
        effect = await _effect(connection, turn, TurnOutcome(row.outcome))
        feedback = new_feedback_id()
        content = content_of(connection)
        stored = None if text is None else content.write_text(storable(text), "feedback.text", feedback)
        values = {
            "id": feedback,
            "turn_id": turn,
            "api_key_id": key,
            "score": score,
            "text": stored,
            "effect": effect,
        }
        await add_stored_bytes(connection, key, ROW_BYTES + len((stored or "").encode()))
        if request is not None:
            await _remember(connection, key, request, effect, feedback)
        await connection.execute(insert(FeedbackRow).values(values))
        facts = SessionFacts(SessionId(row.session_id), row.policy, row.identified_by, row.created_at, row.version)
        return StoredFeedback(FeedbackGiven(feedback, turn), facts, effect)

    @transaction
    async def give_outcome(
        self,
        connection: AsyncConnection,
        key: ApiKeyId,
        policy: str,
        session: str,
        outcome: int,
        request: RepeatableRequest | None = None,
    ) -> FeedbackEffect | None:
        query = (
            select(SessionRow.id, SessionRow.policy, SessionRow.state)
            .join(ApiKeyRow, and_(ApiKeyRow.id == SessionRow.api_key_id, ApiKeyRow.episode_id.is_(None)))
            .where(SessionRow.api_key_id == key, _named(session, policy))
        )
        row = (await connection.execute(query.order_by(SessionRow.id.desc()).limit(1))).first()
        if row is None:
            return None
        recipe_hash = (await lock_policy(connection, row.policy)).recipe_hash
        await connection.execute(update(SessionRow).where(SessionRow.id == row.id).values(task_outcome=outcome))
        decisions = await finalize_outcome_of(connection, SessionId(row.id), closing=False)
        await refresh_work_flag(connection, row.policy)
        amends = bool(decisions)
        if not decisions and row.state != SessionState.CLOSED and recipe_hash is not None:
            with suppress(RecipeRejected):  # of another version of Clawloop
                amends = (await recipe_by_hash(connection, recipe_hash)).signal.reward == "outcome_process"
        effect = FeedbackEffect.AMENDS if amends else FeedbackEffect.RECORDED
        if request is not None:
            await _remember(connection, key, request, effect, None)
            await add_stored_bytes(connection, key, ROW_BYTES)
        return effect

    @transaction
    async def answer_to(
        self, connection: AsyncConnection, key: ApiKeyId, request: RepeatableRequest
    ) -> FeedbackAnswer | None:
        query = select(FeedbackRequestRow.body_sha256, FeedbackRequestRow.feedback_id, FeedbackRequestRow.effect).where(
            FeedbackRequestRow.api_key_id == key, FeedbackRequestRow.key_sha256 == request.key_sha256
        )
        row = (await connection.execute(query)).first()
        if row is None:
            return None
        feedback = None if row.feedback_id is None else FeedbackId(row.feedback_id)
        return FeedbackAnswer(row.body_sha256, feedback, FeedbackEffect(row.effect))

    @transaction
    async def given_on(self, connection: AsyncConnection, key: ApiKeyId, turn: TurnId) -> list[FeedbackView] | None:
        own = (
            select(TurnRow.id)
            .join(SessionRow, SessionRow.id == TurnRow.session_id)
            .where(TurnRow.id == turn, SessionRow.api_key_id == key, TurnRow.kind == TurnKind.MAIN)
        )
        return None if await connection.scalar(own) is None else await read_feedback(connection, [turn])

    @transaction
    async def mark_feedback_notified(self, connection: AsyncConnection, feedback: FeedbackId, ago: timedelta) -> None:
        await mark_feedback_notified(connection, [feedback], ago)


async def _remember(
    connection: AsyncConnection,
    key: ApiKeyId,
    request: RepeatableRequest,
    effect: FeedbackEffect,
    feedback: FeedbackId | None,
) -> None:
    """Store the answer to a request with an Idempotency-Key, and delete old answers.

    Raises:
        AlreadyAnswered: after waiting for another transaction that stored the same key; the caller's is rolled back.
    """
    identity = (FeedbackRequestRow.api_key_id, FeedbackRequestRow.key_sha256)
    old = (
        select(*identity)
        .where(FeedbackRequestRow.received_at < func.now() - REMEMBERED)
        .order_by(FeedbackRequestRow.received_at)
        .limit(_MOST_FORGOTTEN)
        .with_for_update(skip_locked=True)
    )
    await connection.execute(delete(FeedbackRequestRow).where(tuple_(*identity).in_(old)))
    values = {
        "api_key_id": key,
        "key_sha256": request.key_sha256,
        "body_sha256": request.body_sha256,
        "feedback_id": feedback,
        "effect": effect,
    }
    stored = insert(FeedbackRequestRow).values(values).on_conflict_do_nothing().returning(FeedbackRequestRow.effect)
    if await connection.scalar(stored) is None:
        raise AlreadyAnswered("this Idempotency-Key was used meanwhile")


def _named(session: str, policy: str) -> ColumnElement[bool]:
    """Sessions with this Clawloop id, or of this policy with this value of the client's."""
    named = [and_(SessionRow.external_id == storable(session), SessionRow.policy == policy)]
    with suppress(ValueError):
        named.append(SessionRow.id == UUID(session))
    return or_(*named)


async def _effect(connection: AsyncConnection, turn: TurnId, outcome: TurnOutcome) -> FeedbackEffect:
    if outcome is TurnOutcome.NOT_TRAINABLE:
        return FeedbackEffect.RECORDED
    newest = (
        select(SampleRow.state)
        .join(JudgementRow, JudgementRow.id == SampleRow.judgement_id)
        .where(JudgementRow.turn_id == turn)
        .order_by(JudgementRow.revision.desc())
        .limit(1)
    )
    state = await connection.scalar(newest)
    taken = state not in (None, *UNTAKEN)
    return FeedbackEffect.NEW_SAMPLE if taken else FeedbackEffect.AMENDS
