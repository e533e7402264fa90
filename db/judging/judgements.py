"""Judgements in PostgreSQL: one for each revision of a turn, and each answer of a judge once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from clawloop.contracts.sessions import TurnResult
from clawloop.contracts.training import UNTAKEN
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import ApiKeyId, FeedbackId, JudgementId, SessionId, TurnId, new_judgement_id
from clawloop.judging.parsing import Vote
from clawloop.judging.records import (
    VOTES,
    CurrentJudgement,
    FinalizedJudgement,
    GivenFeedback,
    JudgingContext,
    OpenJudgement,
    StoredHint,
    StoredVote,
    TurnContext,
)
from db.content import content_of
from db.database import Database, transaction
from db.judging.finalize import finalize_judgement, require_content
from db.judging.votes import insert_direct_vote, insert_hints, insert_votes, read_open
from db.tables import FeedbackRow, JudgementRow, PolicyRow, RecipeRow, SampleRow, SessionRow, TurnRow
from db.training.recipes import require_recipe
from db.training.samples import read_trained_turns
from db.turns.conversation_cache import ConversationCache
from db.turns.prepared_turn import Request
from db.turns.read import read_turn
from db.turns.session_lookup import parent_candidates

# The nearest main turn above and the nearest main turns below; side turns between do not count. One statement reads all
# that has one row: each statement costs a judge worker more CPU than it costs PostgreSQL.
_FACTS = text("""
    SELECT s.task_outcome, current.revision, current.outcome, current.verdict, current.shown_by,
        (SELECT count(*) FROM turns o WHERE o.session_id = t.session_id AND o.kind = 'main' AND o.id <= t.id) AS number,
        (WITH RECURSIVE up AS (
            SELECT p.id, p.kind, p.parent_turn_id FROM turns p WHERE p.id = t.parent_turn_id
            UNION ALL
            SELECT p.id, p.kind, p.parent_turn_id FROM up JOIN turns p ON p.id = up.parent_turn_id
            WHERE up.kind = 'side')
        SELECT id FROM up WHERE kind = 'main') AS follows,
        below.followed_by, below.overtaken_by,
        EXISTS (SELECT FROM feedback f WHERE f.turn_id = t.id) AS rated,
        EXISTS (
            SELECT FROM turns o
            WHERE o.session_id = t.session_id AND o.outcome IN ('trained', 'rolled_back')) AS session_trained
    FROM turns t JOIN sessions s ON s.id = t.session_id
    LEFT JOIN LATERAL (
        SELECT j.revision, j.outcome, j.verdict, j.shown_by FROM judgements j
        WHERE j.turn_id = t.id AND j.decided_at IS NOT NULL
        ORDER BY j.revision DESC, j.decided_at DESC LIMIT 1) current ON true
    CROSS JOIN LATERAL (
        WITH RECURSIVE down AS (
            SELECT c.id, c.kind, c.entered_at FROM turns c WHERE c.parent_turn_id = t.id
            UNION ALL
            SELECT c.id, c.kind, c.entered_at FROM down JOIN turns c ON c.parent_turn_id = down.id
            WHERE down.kind = 'side')
        SELECT array_agg(id ORDER BY id) AS followed_by,
            array_agg(id) FILTER (WHERE entered_at < t.entered_at) AS overtaken_by
        FROM down WHERE kind = 'main') below
    WHERE t.id = :turn_id
""")


class PostgresJudgementStore:
    """Satisfies `activities.judging.ports.JudgementStore`.

    Args:
        conversations: shared with other stores on the same PostgreSQL.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        self._database = database
        self._conversations = conversations or ConversationCache()

    @transaction
    async def load_context(self, connection: AsyncConnection, turn_id: TurnId) -> TurnContext | None:
        context, _ = await self._context(connection, turn_id)
        return context

    @transaction
    async def load_judging(
        self, connection: AsyncConnection, turn_id: TurnId, trained_limit: int
    ) -> JudgingContext | None:
        turn, has_trained = await self._context(connection, turn_id)
        if turn is None:
            return None
        before, _ = (None, False) if turn.follows is None else await self._context(connection, turn.follows)
        trained = await read_trained_turns(connection, turn.turn.session_id, trained_limit) if has_trained else []
        return JudgingContext(turn, before, trained)

    @transaction
    async def trained_turns(self, connection: AsyncConnection, session: SessionId, limit: int) -> list[TurnResult]:
        return await read_trained_turns(connection, session, limit)

    @transaction
    async def open(
        self,
        connection: AsyncConnection,
        turn_id: TurnId,
        next_turn_id: TurnId | None,
        evidence_hash: bytes,
        hint_kind: str,
        revision: int = 0,
    ) -> OpenJudgement:
        return await _open(connection, turn_id, next_turn_id, evidence_hash, hint_kind, revision)

    @transaction
    async def revise(
        self,
        connection: AsyncConnection,
        turn_id: TurnId,
        next_turn_id: TurnId | None,
        evidence_hash: bytes,
        hint_kind: str,
    ) -> OpenJudgement:
        await _lock(connection, turn_id, next_turn_id)
        after = aliased(TurnRow)
        newest = (
            select(
                JudgementRow.id,
                JudgementRow.recipe_hash,
                JudgementRow.revision,
                SampleRow.state,
                after.outcome.label("after"),
                and_(JudgementRow.decided_at.is_(None), JudgementRow.shown_by.is_(None)).label("nothing_followed"),
            )
            .outerjoin(SampleRow, SampleRow.judgement_id == JudgementRow.id)
            .outerjoin(after, after.id == JudgementRow.shown_by)
            .where(JudgementRow.turn_id == turn_id)
            .order_by(JudgementRow.revision.desc(), JudgementRow.opened_at.desc())
            .limit(1)
        )
        row = (await connection.execute(newest)).first()
        if row is None:
            return await _open(connection, turn_id, next_turn_id, evidence_hash, hint_kind)
        # A judgement's answers may quote only the turn in its `shown_by`, by which an erasure finds them. So it is not
        # continued if that turn was erased, or if it has none and there is a next turn now.
        other_evidence = row.after == TurnOutcome.ERASED or (row.nothing_followed and next_turn_id is not None)
        if row.state in (None, *UNTAKEN) and not other_evidence:
            return await read_open(connection, JudgementId(row.id), row.recipe_hash, hint_kind)
        return await _open(connection, turn_id, next_turn_id, evidence_hash, hint_kind, row.revision + 1)

    @transaction
    async def store_votes(
        self, connection: AsyncConnection, judgement: JudgementId, votes: Sequence[StoredVote]
    ) -> None:
        await insert_votes(connection, judgement, VOTES, votes)

    @transaction
    async def store_direct_vote(
        self, connection: AsyncConnection, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
    ) -> Mapping[Vote, float]:
        return await insert_direct_vote(connection, judgement, logprobs, vote)

    @transaction
    async def store_hints(
        self, connection: AsyncConnection, judgement: JudgementId, kind: str, hints: Sequence[StoredHint]
    ) -> None:
        await insert_hints(connection, judgement, kind, hints)

    @transaction
    async def finalize(
        self,
        connection: AsyncConnection,
        judgement: JudgementId,
        finalized: FinalizedJudgement,
        feedback_ids: Sequence[FeedbackId],
    ) -> str | None:
        return await finalize_judgement(connection, judgement, finalized, feedback_ids)

    async def _context(self, connection: AsyncConnection, turn_id: TurnId) -> tuple[TurnContext | None, bool]:
        """A main turn's context, and whether a turn of its session was ever trained."""
        turn = await read_turn(connection, self._conversations, turn_id)
        if turn is None or turn.record.kind is not TurnKind.MAIN:
            return None, False
        record = turn.record
        request = Request(record.api_key_id, record.evidence, record.messages, record.group_id or turn_id)
        facts = (await connection.execute(_FACTS, {"turn_id": turn_id})).first()
        if facts is None:  # deleted meanwhile, with its session
            return None, False
        context = TurnContext(
            turn=turn,
            number=facts.number,
            seed=request.seed,
            candidates=await parent_candidates(connection, turn.session_id, request),
            follows=None if facts.follows is None else TurnId(facts.follows),
            followed_by=[TurnId(later) for later in facts.followed_by or ()],
            overtaken_by=frozenset(TurnId(later) for later in facts.overtaken_by or ()),
            current=None if facts.revision is None else _current_judgement(facts),
            task_outcome=facts.task_outcome,
            feedback=await _feedback(connection, turn_id) if facts.rated else [],
        )
        return context, facts.session_trained


async def _feedback(connection: AsyncConnection, turn_id: TurnId) -> list[GivenFeedback]:
    query = select(FeedbackRow).where(FeedbackRow.turn_id == turn_id).order_by(FeedbackRow.received_at, FeedbackRow.id)
    content = content_of(connection)
    return [
        GivenFeedback(
            id=FeedbackId(row.id),
            turn_id=TurnId(row.turn_id),
            api_key_id=ApiKeyId(row.api_key_id),
            score=row.score,
            text=content.read_text(row.text, "feedback.text", row.id),
            received_at=row.received_at,
            applied=row.applied_at is not None,
        )
        for row in await connection.execute(query)
    ]


def _current_judgement(row: Any) -> CurrentJudgement:
    next_turn_id = None if row.shown_by is None else TurnId(row.shown_by)
    return CurrentJudgement(row.revision, TurnOutcome(row.outcome), row.verdict, next_turn_id)


async def _open(
    connection: AsyncConnection,
    turn_id: TurnId,
    next_turn_id: TurnId | None,
    evidence_hash: bytes,
    hint_kind: str,
    revision: int = 0,
) -> OpenJudgement:
    policy = await _lock(connection, turn_id, next_turn_id)
    # A judgement in progress keeps its recipe, whatever the policy's recipe is by now.
    stored = (
        select(JudgementRow.id, JudgementRow.recipe_hash, RecipeRow.content)
        .select_from(PolicyRow)
        .outerjoin(RecipeRow, RecipeRow.hash == PolicyRow.recipe_hash)
        .outerjoin(JudgementRow, and_(JudgementRow.turn_id == turn_id, JudgementRow.revision == revision))
        .where(PolicyRow.id == policy)
    )
    row = (await connection.execute(stored)).one()
    if row.id is not None:
        return await read_open(connection, JudgementId(row.id), row.recipe_hash, hint_kind)
    recipe = require_recipe(policy, row.content)
    judgement = new_judgement_id()
    values = {
        "id": judgement,
        "turn_id": turn_id,
        "recipe_hash": recipe.hash,
        "revision": revision,
        "shown_by": next_turn_id,
        "evidence_hash": content_of(connection).write_digest(evidence_hash),
    }
    await connection.execute(insert(JudgementRow).values(values))
    return OpenJudgement(judgement, recipe, {}, {})


async def _lock(connection: AsyncConnection, turn_id: TurnId, next_turn_id: TurnId | None) -> str:
    """The turn's policy. Locks the turn, and keeps the one that holds its next state from being erased.

    Raises:
        RecordUnusable: one of them was erased.
    """
    query = (
        select(SessionRow.policy, TurnRow.outcome)
        .join(TurnRow, TurnRow.session_id == SessionRow.id)
        .where(TurnRow.id == turn_id)
    )
    row = (await connection.execute(query.with_for_update(of=TurnRow))).one()
    require_content(turn_id, row.outcome)
    if next_turn_id is not None:
        after = select(TurnRow.outcome).where(TurnRow.id == next_turn_id).with_for_update(read=True, key_share=True)
        require_content(next_turn_id, (await connection.execute(after)).scalar_one())
    policy: str = row.policy
    return policy
