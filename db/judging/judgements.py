"""Judgements in PostgreSQL: opened once for each revision, and each answer of a judge kept once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from sqlalchemy import and_, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from clawloop.contracts.training import SampleState
from clawloop.contracts.turns import TurnKind, TurnOutcome
from clawloop.ids import (
    ApiKeyId,
    FeedbackId,
    JudgementId,
    SessionId,
    TurnId,
    new_judgement_id,
)
from clawloop.judging.parsing import HintVote, Vote
from clawloop.judging.records import (
    VOTES,
    CurrentJudgement,
    FinalizedJudgement,
    GivenFeedback,
    OpenJudgement,
    TrainedTurn,
    TurnContext,
)
from db.database import Database
from db.judging.finalize import finalize_judgement, require_content
from db.judging.votes import insert_direct_vote, insert_hint, insert_vote, read_open
from db.tables import Feedback, Judgement, Sample, Session, Turn
from db.training.recipes import recipe_of_policy
from db.training.trained_turns import read_trained
from db.turns.conversation_cache import ConversationCache
from db.turns.prepared_turn import Request
from db.turns.read import read_turn
from db.turns.session_lookup import candidates_in

# The next main turn up and the next main turns down, over side turns, which do not count.
_FOLLOWS = text("""
    WITH RECURSIVE up AS (
        SELECT p.id, p.kind, p.parent_turn_id FROM turns t JOIN turns p ON p.id = t.parent_turn_id WHERE t.id = :turn_id
        UNION ALL
        SELECT p.id, p.kind, p.parent_turn_id FROM up JOIN turns p ON p.id = up.parent_turn_id WHERE up.kind = 'side')
    SELECT id FROM up WHERE kind = 'main'
""")
_FOLLOWED_BY = text("""
    WITH RECURSIVE down AS (
        SELECT id, kind, entered_at FROM turns WHERE parent_turn_id = :turn_id
        UNION ALL
        SELECT t.id, t.kind, t.entered_at FROM down JOIN turns t ON t.parent_turn_id = down.id WHERE down.kind = 'side')
    SELECT id, entered_at FROM down WHERE kind = 'main' ORDER BY id
""")


class PostgresJudgementStore:
    """Satisfies `activities.judging.ports.JudgementStore`.

    Args:
        chains: share them with other stores on the same PostgreSQL.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        self._database = database
        self._conversations = conversations or ConversationCache()

    async def place(self, turn_id: TurnId) -> TurnContext | None:
        """A main turn with what is around it; None if there is none of that id, or it is a side turn.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(self._place, turn_id))

    async def trained(self, session: SessionId, limit: int) -> list[TrainedTurn]:
        """The session's newest `limit` main turns that were trained, rolled back since or not, in their order.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(read_trained, session, limit))

    async def open(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        """The turn's judgement of revision 0: made now under its policy's recipe, or gone on with.

        Raises:
            StoreUnavailable
            RecordUnusable: the policy has no recipe, or the turn, or what followed it, was erased.
        """
        return await self._database.run(partial(_open, turn_id, next_turn_id, evidence_hash, hint_kind))

    async def revise(
        self, turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        """The turn's newest judgement to amend; a further revision once a step has taken its sample.

        Raises:
            StoreUnavailable
            RecordUnusable: the policy has no recipe, or the turn, or what followed it, was erased.
        """
        return await self._database.run(partial(_revise, turn_id, next_turn_id, evidence_hash, hint_kind))

    async def rejudge(
        self, turn_id: TurnId, revision: int, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str
    ) -> OpenJudgement:
        """The turn's judgement of this revision: made now under its policy's recipe, or gone on with.

        Raises:
            StoreUnavailable
            RecordUnusable: the policy has no recipe, or the turn, or what followed it, was erased.
        """
        return await self._database.run(
            partial(_open, turn_id, next_turn_id, evidence_hash, hint_kind, revision=revision)
        )

    async def store_vote(self, judgement: JudgementId, index: int, raw: str, vote: Vote | None) -> None:
        """Keep one answer for good; the first one counts, and none once the judgement is decided.

        Raises:
            StoreUnavailable
        """
        await self._database.run(partial(insert_vote, judgement, VOTES, index, raw, vote))

    async def store_direct_vote(
        self, judgement: JudgementId, logprobs: Mapping[Vote, float], vote: Vote
    ) -> Mapping[Vote, float]:
        """Keep a direct vote, its log-probs as they came, for good; the first one counts, and is returned.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(insert_direct_vote, judgement, logprobs, vote))

    async def store_hint(self, judgement: JudgementId, kind: str, index: int, raw: str, hint: HintVote | None) -> None:
        """
        Raises:
            StoreUnavailable
        """
        await self._database.run(partial(insert_hint, judgement, kind, index, raw, hint))

    async def finalize(self, judgement: JudgementId, end: FinalizedJudgement, heard: list[FeedbackId]) -> str | None:
        """Verdict, hint, sample and the turn's outcome in one transaction; feedback `heard` is taken into it.

        Samples of the turn's other judgements that no step has taken are superseded. Where a step has taken one, only
        new feedback makes a further sample: without any, the judgement is not held and the turn stays as it is.

        Returns:
            The policy that has a batch waiting since this call; None if it has none, or had one before.

        Raises:
            RecordUnusable: the turn, or what followed it, was erased meanwhile.
            StoreUnavailable: also when a step took the sample that was to be amended; `revise` then gives another. And
                when feedback it has not heard of was taken in meanwhile: a judge's late answer does not undo it. And
                when the stored votes are not those it was decided by: whoever tries again reads them.
        """
        return await self._database.run(partial(finalize_judgement, judgement, end, heard))

    async def feedback_of(self, turn_id: TurnId) -> list[GivenFeedback]:
        """All feedback on a turn, oldest first.

        Raises:
            StoreUnavailable
        """
        return await self._database.run(partial(_feedback_of, turn_id))

    async def _place(self, turn_id: TurnId, connection: AsyncConnection) -> TurnContext | None:
        turn = await read_turn(self._conversations, turn_id, connection)
        if turn is None or turn.record.kind is not TurnKind.MAIN:
            return None
        record = turn.record
        request = Request(record.api_key_id, record.evidence, record.messages, record.group_id or turn_id)
        mine = Turn.session_id == turn.session_id
        older = select(func.count()).where(mine, Turn.kind == TurnKind.MAIN, Turn.id <= turn_id)
        entered_at = await connection.scalar(select(Turn.entered_at).where(Turn.id == turn_id))
        after = (await connection.execute(_FOLLOWED_BY, {"turn_id": turn_id})).all()
        held = (await connection.execute(_HELD, {"turn_id": turn_id})).first()
        follows = await connection.scalar(_FOLLOWS, {"turn_id": turn_id})
        return TurnContext(
            turn=turn,
            number=await connection.scalar(older) or 0,
            seed=request.seed,
            candidates=await candidates_in(connection, turn.session_id, request.replies, request.before),
            follows=None if follows is None else TurnId(follows),
            followed_by=[TurnId(row.id) for row in after],
            overtaken_by=frozenset(TurnId(row.id) for row in after if row.entered_at < entered_at),
            held=None if held is None else _held(held),
            task_outcome=await connection.scalar(select(Session.task_outcome).where(Session.id == turn.session_id)),
        )


_HELD = text("""
    SELECT revision, outcome, verdict, shown_by FROM judgements WHERE turn_id = :turn_id AND decided_at IS NOT NULL
    ORDER BY revision DESC, decided_at DESC LIMIT 1
""")


def _held(row: Any) -> CurrentJudgement:
    return CurrentJudgement(
        row.revision, TurnOutcome(row.outcome), row.verdict, None if row.shown_by is None else TurnId(row.shown_by)
    )


async def _open(
    turn_id: TurnId,
    next_turn_id: TurnId | None,
    evidence_hash: bytes,
    hint_kind: str,
    connection: AsyncConnection,
    revision: int = 0,
) -> OpenJudgement:
    policy = await _lock(connection, turn_id, next_turn_id)
    # One under way keeps its recipe, whatever the policy learns by now.
    known = select(Judgement.id, Judgement.recipe_hash).where(
        Judgement.turn_id == turn_id, Judgement.revision == revision
    )
    if (row := (await connection.execute(known)).first()) is not None:
        return await read_open(connection, JudgementId(row.id), row.recipe_hash, hint_kind)
    recipe = await recipe_of_policy(connection, policy)
    made = new_judgement_id()
    values = {
        "id": made,
        "turn_id": turn_id,
        "recipe_hash": recipe.hash,
        "revision": revision,
        "shown_by": next_turn_id,
        "evidence_hash": evidence_hash,
    }
    await connection.execute(insert(Judgement).values(values))
    return OpenJudgement(made, recipe, {}, {})


async def _lock(connection: AsyncConnection, turn_id: TurnId, next_turn_id: TurnId | None) -> str:
    """The turn's policy; its row is ours until the end of the transaction, and what followed it is not erased.

    Raises:
        RecordUnusable: one of them was erased.
    """
    query = select(Session.policy, Turn.outcome).join(Turn, Turn.session_id == Session.id).where(Turn.id == turn_id)
    row = (await connection.execute(query.with_for_update(of=Turn))).one()
    require_content(turn_id, row.outcome)
    if next_turn_id is not None:
        after = select(Turn.outcome).where(Turn.id == next_turn_id).with_for_update(read=True, key_share=True)
        require_content(next_turn_id, (await connection.execute(after)).scalar_one())
    policy: str = row.policy
    return policy


async def _revise(
    turn_id: TurnId, next_turn_id: TurnId | None, evidence_hash: bytes, hint_kind: str, connection: AsyncConnection
) -> OpenJudgement:
    await _lock(connection, turn_id, next_turn_id)
    after = aliased(Turn)
    newest = (
        select(
            Judgement.id,
            Judgement.recipe_hash,
            Judgement.revision,
            Sample.state,
            after.outcome.label("after"),
            and_(Judgement.decided_at.is_(None), Judgement.shown_by.is_(None)).label("nothing_followed"),
        )
        .outerjoin(Sample, Sample.judgement_id == Judgement.id)
        .outerjoin(after, after.id == Judgement.shown_by)
        .where(Judgement.turn_id == turn_id)
        .order_by(Judgement.revision.desc(), Judgement.opened_at.desc())
        .limit(1)
    )
    row = (await connection.execute(newest)).first()
    if row is None:
        return await _open(turn_id, next_turn_id, evidence_hash, hint_kind, connection)
    # One is by the words of the turn it names and of no other: who erases those finds it, and whoever goes on, none.
    other_words = row.after == TurnOutcome.ERASED or (row.nothing_followed and next_turn_id is not None)
    if row.state in (None, SampleState.FRESH, SampleState.SUPERSEDED) and not other_words:
        return await read_open(connection, JudgementId(row.id), row.recipe_hash, hint_kind)
    return await _open(turn_id, next_turn_id, evidence_hash, hint_kind, connection, row.revision + 1)


async def _feedback_of(turn_id: TurnId, connection: AsyncConnection) -> list[GivenFeedback]:
    query = select(Feedback).where(Feedback.turn_id == turn_id).order_by(Feedback.received_at, Feedback.id)
    return [
        GivenFeedback(
            id=FeedbackId(row.id),
            turn_id=TurnId(row.turn_id),
            api_key_id=ApiKeyId(row.api_key_id),
            score=row.score,
            text=row.text,
            received_at=row.received_at,
            applied=row.applied_at is not None,
        )
        for row in await connection.execute(query)
    ]
