"""Judgements in PostgreSQL: one for each revision of a turn, and each answer of a judge once.

Calls of one kind that come together share a transaction (`db/group_commit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import and_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from clawloop.contracts.sessions import TurnResult
from clawloop.contracts.training import UNTAKEN
from clawloop.contracts.turns import TurnOutcome
from clawloop.errors import RecordUnusable
from clawloop.ids import FeedbackId, JudgementId, SessionId, TurnId
from clawloop.judging.parsing import Vote
from clawloop.judging.prompts import JudgeReply
from clawloop.judging.records import (
    VOTES,
    FinalizedJudgement,
    JudgingContext,
    OpenJudgement,
    StoredAnswers,
    StoredHint,
    StoredVote,
    TurnContext,
)
from db.database import Database, transaction
from db.group_commit import Answer, GroupCommit, limit_lock_wait
from db.judging.contexts import read_contexts
from db.judging.finalize import Finalizing, finalize
from db.judging.opening import Opening, lock_turn, open_judgement, open_judgements
from db.judging.votes import Hints, Votes, insert_direct_vote, insert_hints, insert_votes, read_open
from db.tables import JudgementRow, SampleRow, TurnRow
from db.training.samples import read_trained_turns
from db.turns.conversation_cache import ConversationCache


class PostgresJudgementStore:
    """Satisfies `activities.judging.ports.JudgementStore`.

    Args:
        conversations: shared with other stores on the same PostgreSQL.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        self._database = database
        self._conversations = conversations or ConversationCache()
        self._loading = GroupCommit[tuple[TurnId, int], JudgingContext | None](
            self._load_together, lambda call: call[0]
        )
        self._opening = GroupCommit[Opening, OpenJudgement](self._open_together, lambda call: call.turn_id)
        self._voting = GroupCommit[Votes, StoredAnswers](self._insert_votes, lambda call: call[:2])
        self._hinting = GroupCommit[Hints, StoredAnswers](self._insert_hints, lambda call: call[:2])
        self._finalizing = GroupCommit[Finalizing, str | None](self._finalize, lambda call: call.judgement)

    @transaction
    async def load_context(self, connection: AsyncConnection, turn_id: TurnId) -> TurnContext | None:
        found = await read_contexts(connection, self._conversations, [turn_id], with_followed=False)
        return found[turn_id][0] if turn_id in found else None

    async def load_judging(self, turn_id: TurnId, trained_limit: int) -> JudgingContext | None:
        return await self._loading.run((turn_id, trained_limit))

    @transaction
    async def trained_turns(self, connection: AsyncConnection, session: SessionId, limit: int) -> list[TurnResult]:
        return await read_trained_turns(connection, session, limit)

    async def open(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str, revision: int = 0
    ) -> OpenJudgement:
        return await self._opening.run(Opening(turn_id, next_turn_id, evidence_hash, hint_kind, revision))

    @transaction
    async def revise(
        self,
        connection: AsyncConnection,
        turn_id: TurnId,
        next_turn_id: TurnId | None,
        evidence_hash: bytes,
        hint_kind: str,
    ) -> OpenJudgement:
        await lock_turn(connection, turn_id, next_turn_id)
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
            return await open_judgement(connection, Opening(turn_id, next_turn_id, evidence_hash, hint_kind))
        # A judgement's answers may quote only the turn in its `shown_by`, by which an erasure finds them. So it is not
        # continued if that turn was erased, or if it has none and there is a next turn now.
        other_evidence = row.after == TurnOutcome.ERASED or (row.nothing_followed and next_turn_id is not None)
        if row.state in (None, *UNTAKEN) and not other_evidence:
            return await read_open(connection, JudgementId(row.id), row.recipe_hash, hint_kind)
        opening = Opening(turn_id, next_turn_id, evidence_hash, hint_kind, row.revision + 1)
        return await open_judgement(connection, opening)

    async def store_votes(
        self, judgement: JudgementId, votes: Sequence[StoredVote], replies: Mapping[int, JudgeReply] | None = None
    ) -> StoredAnswers:
        return await self._voting.run((judgement, VOTES, votes, replies or {}))

    @transaction
    async def store_direct_vote(
        self, connection: AsyncConnection, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
    ) -> StoredAnswers:
        return await insert_direct_vote(connection, judgement, logprobs, vote)

    async def store_hints(self, judgement: JudgementId, kind: str, hints: Sequence[StoredHint]) -> StoredAnswers:
        return await self._hinting.run((judgement, kind, hints))

    async def finalize(
        self, judgement: JudgementId, finalized: FinalizedJudgement, feedback_ids: Sequence[FeedbackId]
    ) -> str | None:
        finalizing = Finalizing(judgement, finalized, feedback_ids)
        return await self._finalizing.run(finalizing, alone=not finalizing.is_ordinary)

    # Calls of one kind that come together -----------------------------------------------------------------------------

    @transaction
    async def _load_together(
        self, connection: AsyncConnection, calls: Sequence[tuple[TurnId, int]]
    ) -> list[JudgingContext | None]:
        turn_ids = [turn_id for turn_id, _ in calls]
        found = await read_contexts(connection, self._conversations, turn_ids, with_followed=True)
        loaded: list[JudgingContext | None] = []
        for turn_id, trained_limit in calls:
            if turn_id not in found:
                loaded.append(None)
                continue
            turn, has_trained = found[turn_id]
            before, _ = (None, False) if turn.follows is None else found.get(turn.follows, (None, False))
            session = turn.turn.session_id
            trained = await read_trained_turns(connection, session, trained_limit) if has_trained else []
            loaded.append(JudgingContext(turn, before, trained))
        return loaded

    @transaction
    async def _open_together(
        self, connection: AsyncConnection, calls: Sequence[Opening]
    ) -> list[OpenJudgement | RecordUnusable]:
        await limit_lock_wait(connection, calls)
        return await open_judgements(connection, calls)

    @transaction
    async def _insert_votes(self, connection: AsyncConnection, calls: Sequence[Votes]) -> list[StoredAnswers]:
        await limit_lock_wait(connection, calls)
        return await insert_votes(connection, calls)

    @transaction
    async def _insert_hints(self, connection: AsyncConnection, calls: Sequence[Hints]) -> list[StoredAnswers]:
        await limit_lock_wait(connection, calls)
        return await insert_hints(connection, calls)

    @transaction
    async def _finalize(self, connection: AsyncConnection, calls: Sequence[Finalizing]) -> list[Answer[str | None]]:
        await limit_lock_wait(connection, calls)
        return await finalize(connection, calls)
