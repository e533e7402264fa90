"""Judgements in PostgreSQL: what they need of turns, how they are opened, and one row for each revision of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from cachetools import LRUCache
from psycopg.rows import dict_row
from sqlalchemy import and_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.sessions import TurnResult
from clawloop.core.contracts.training import UNTAKEN
from clawloop.core.contracts.turns import MatchedBy, TurnOutcome
from clawloop.core.errors import RecordUnusable
from clawloop.core.ids import ApiKeyId, FeedbackId, JudgementId, SessionId, TurnId, new_judgement_id
from clawloop.core.judging.prompts import JudgeReply
from clawloop.core.judging.records import (
    VOTES,
    CurrentJudgement,
    FinalizedJudgement,
    GivenFeedback,
    JudgingContext,
    OpenJudgement,
    StoredAnswers,
    StoredHint,
    StoredVote,
    TurnContext,
)
from clawloop.core.judging.voting import Vote
from clawloop.core.recipes.recipe import Recipe
from clawloop.core.turns.parents import may_be_placed
from db.content import content_of
from db.database import Database, PostgresStore, raw_connection, transaction
from db.encryption.columns import opened
from db.group_commit import Answer, GroupCommit, limit_lock_wait
from db.judging.finalize import Finalizing, finalize
from db.judging.tables import newest_judgement
from db.judging.votes import Hints, Votes, insert_direct_vote, insert_hints, insert_votes, read_open
from db.lessons.ledger import read_lessons_in_force
from db.tables import FeedbackRow, JudgementRow, SampleRow, TurnRow
from db.training.recipes import recipe_by_hash
from db.training.samples import read_trained_turns
from db.turns.prepared_turn import Request
from db.turns.read import LESSON_TEXTS, ConversationCache, stored_turn
from db.turns.session_lookup import candidates_of_many, find_places_in

# Contexts -------------------------------------------------------------------------------------------------------------
# Reads what judging needs of turns, of any number of them in a handful of statements.
#
# The statements go to psycopg directly: with SQLAlchemy each takes several times the CPU, and each judged turn pays
# for it. What is rare (feedback, a conversation that is in no cache) uses the shared functions. Every function works
# in the caller's transaction.

# The nearest main turn above; side turns between do not count.
_ABOVE = """(
    WITH RECURSIVE up AS (
        SELECT p.id, p.kind, p.parent_turn_id FROM turns p WHERE p.id = t.parent_turn_id
        UNION ALL
        SELECT p.id, p.kind, p.parent_turn_id FROM up JOIN turns p ON p.id = up.parent_turn_id
        WHERE up.kind = 'side')
    SELECT id FROM up WHERE kind = 'main')"""
# A turn is overtaken by one that entered or was signalled before it: transactions do not commit in the order in which
# they began, which `entered_at` is, so the later turn may have been judged before this one was there.
# One statement reads all that has one row: each statement costs a judge worker more CPU than it costs PostgreSQL.
_TURNS = f"""
    WITH asked AS (SELECT t.id, CASE WHEN %b THEN {_ABOVE} END AS above FROM turns t WHERE t.id = ANY(%b::uuid[]))
    SELECT {", ".join(f"t.{column.name}" for column in TurnRow.__table__.columns)},
        s.policy, s.api_key_id, s.task_outcome, l.tools, {LESSON_TEXTS} AS lesson_texts,
        current.revision AS judged_revision, current.outcome AS judged_outcome, current.verdict AS judged_verdict,
        current.shown_by AS judged_by, current.recipe_hash AS judged_recipe,
        (SELECT count(*) FROM turns o WHERE o.session_id = t.session_id AND o.kind = 'main' AND o.id <= t.id) AS number,
        {_ABOVE} AS follows, below.followed_by, below.overtaken_by,
        EXISTS (SELECT FROM feedback f WHERE f.turn_id = t.id) AS rated,
        EXISTS (
            SELECT FROM turns o
            WHERE o.session_id = t.session_id AND o.outcome IN ('trained', 'rolled_back')) AS session_trained
    FROM (SELECT id FROM asked UNION SELECT above FROM asked) wanted
    JOIN turns t ON t.id = wanted.id JOIN sessions s ON s.id = t.session_id
    LEFT JOIN tool_lists l ON l.sha256 = t.tools_sha256
    LEFT JOIN LATERAL {newest_judgement("t.id")} current ON true
    CROSS JOIN LATERAL (
        WITH RECURSIVE down AS (
            SELECT c.id, c.kind, c.entered_at, c.announced_at FROM turns c WHERE c.parent_turn_id = t.id
            UNION ALL
            SELECT c.id, c.kind, c.entered_at, c.announced_at FROM down JOIN turns c ON c.parent_turn_id = down.id
            WHERE down.kind = 'side')
        SELECT array_agg(id ORDER BY id) AS followed_by,
            array_agg(id) FILTER (
                WHERE entered_at < t.entered_at OR announced_at < coalesce(t.announced_at, 'infinity')) AS overtaken_by
        FROM down WHERE kind = 'main') below
    WHERE t.kind = 'main'
    ORDER BY t.id
"""


async def read_contexts(
    connection: AsyncConnection, conversations: ConversationCache, turn_ids: Sequence[TurnId], *, with_followed: bool
) -> dict[TurnId, tuple[TurnContext, bool]]:
    """The context of each main turn among these, and whether any turn of its session was ever trained.

    Args:
        with_followed: also of the main turns that these follow.
    """
    raw = await raw_connection(connection)
    async with raw.cursor(row_factory=dict_row, binary=True) as cursor:
        await cursor.execute(_TURNS, [with_followed, list(turn_ids)])
        rows = await cursor.fetchall()
    requests: list[tuple[SessionId, Request]] = []
    turns = []
    for row in rows:
        conversation = await conversations.of_row(connection, row)
        turn = stored_turn(row, conversation, content_of(connection))
        record = turn.record
        turns.append(turn)
        first = record.group_id or record.turn_id
        requests.append((turn.session_id, Request(record.api_key_id, record.evidence, record.messages, first)))
    candidates = await candidates_of_many(raw, content_of(connection), requests)
    placed = [
        (await find_places_in(connection, session, request)).replies
        if turn.matched_by is not MatchedBy.CONTEXT and may_be_placed(request.history, found)
        else []
        for turn, (session, request), found in zip(turns, requests, candidates, strict=True)
    ]
    return {
        turn.record.turn_id: (
            TurnContext(
                turn=turn,
                number=row["number"],
                seed=request.seed,
                candidates=found,
                follows=None if row["follows"] is None else TurnId(row["follows"]),
                followed_by=[TurnId(later) for later in row["followed_by"] or ()],
                overtaken_by=frozenset(TurnId(later) for later in row["overtaken_by"] or ()),
                current=await _current_judgement(connection, row),
                task_outcome=row["task_outcome"],
                feedback=await _feedback(connection, turn.record.turn_id) if row["rated"] else [],
                placed=by_place,
            ),
            row["session_trained"],
        )
        for row, turn, (_, request), found, by_place in zip(rows, turns, requests, candidates, placed, strict=True)
    }


async def _current_judgement(connection: AsyncConnection, row: Mapping[str, Any]) -> CurrentJudgement | None:
    if row["judged_revision"] is None:
        return None
    next_turn_id = None if row["judged_by"] is None else TurnId(row["judged_by"])
    outcome = TurnOutcome(row["judged_outcome"])
    by_words = (await _recipe(connection, row["judged_recipe"])).signal.learns_from_words
    return CurrentJudgement(row["judged_revision"], outcome, row["judged_verdict"], next_turn_id, by_words)


async def _feedback(connection: AsyncConnection, turn_id: TurnId) -> list[GivenFeedback]:
    query = select(FeedbackRow).where(FeedbackRow.turn_id == turn_id).order_by(FeedbackRow.received_at, FeedbackRow.id)
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
        for row in opened(connection, await connection.execute(query), feedback="id")
    ]


# Judgements -----------------------------------------------------------------------------------------------------------
# Judgements in PostgreSQL: one for each revision of a turn, and each answer of a judge once.
#
# Calls of one kind that come together share a transaction (`db/group_commit.py`).


class PostgresJudgementStore(PostgresStore):
    """Satisfies `activities.judging.judge_turn.JudgementStore`.

    Args:
        conversations: shared with other stores on the same PostgreSQL.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        super().__init__(database)
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

    @transaction
    async def lessons(self, connection: AsyncConnection, policy: str) -> list[ShownLesson]:
        return await read_lessons_in_force(connection, policy)

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


# Opening --------------------------------------------------------------------------------------------------------------
# Opens judgements, of any number of turns in a handful of statements.
#
# Every function works in the caller's transaction. The statements go to psycopg directly, in a pipeline: with
# SQLAlchemy each takes several times the CPU, and each judged turn pays for it.

# A policy has few recipes in use, and a recipe never changes; reading one is a large part of opening a judgement.
_RECIPES: LRUCache[str, Recipe] = LRUCache(64)

# Keeps them from being erased, in the order of erasures.
_KEEP = "SELECT id, outcome FROM turns WHERE id = ANY(%b::uuid[]) ORDER BY id FOR KEY SHARE"
# Two openings of one turn's judgement come one after the other. New turns may refer to a turn that is locked so.
_LOCK = "SELECT id, outcome FROM turns WHERE id = ANY(%b::uuid[]) ORDER BY id FOR NO KEY UPDATE"
# Statements of their own: they see what was committed while this transaction waited for the locks.
_FACTS = """
    SELECT t.id, s.policy, p.recipe_hash, j.id, j.recipe_hash
    FROM unnest(%b::uuid[], %b::int[]) AS r(turn_id, revision)
    JOIN turns t ON t.id = r.turn_id JOIN sessions s ON s.id = t.session_id JOIN policies p ON p.id = s.policy
    LEFT JOIN judgements j ON j.turn_id = t.id AND j.revision = r.revision
"""
_INSERT = """
    INSERT INTO judgements (id, turn_id, recipe_hash, revision, shown_by, evidence_hash)
    SELECT * FROM unnest(%b::uuid[], %b::uuid[], %b::text[], %b::int[], %s::uuid[], %b::bytea[])
"""


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments of `activities.judging.judge_turn.JudgementStore.open`."""

    turn_id: TurnId
    next_turn_id: TurnId | None
    evidence_hash: bytes
    hint_kind: str
    revision: int = 0


async def open_judgement(connection: AsyncConnection, opening: Opening) -> OpenJudgement:
    """
    Raises:
        RecordUnusable: as `JudgementStore.open`.
    """
    (opened,) = await open_judgements(connection, [opening])
    if isinstance(opened, Exception):
        raise opened
    return opened


async def open_judgements(
    connection: AsyncConnection, openings: Sequence[Opening]
) -> list[OpenJudgement | RecordUnusable]:
    """A judgement of each turn: continued, or made now under its policy's recipe.

    Args:
        openings: of different turns.
    """
    raw = await raw_connection(connection)
    turns = [opening.turn_id for opening in openings]
    later = [opening.next_turn_id for opening in openings if opening.next_turn_id is not None]
    async with raw.pipeline():
        kept = await raw.execute(_KEEP, [[*turns, *later]])
        locked = await raw.execute(_LOCK, [turns])
        facts = await raw.execute(_FACTS, [turns, [opening.revision for opening in openings]])
    outcomes: dict[UUID, str] = dict(await kept.fetchall()) | dict(await locked.fetchall())
    found = {row[0]: row[1:] for row in await facts.fetchall()}
    opened: list[OpenJudgement | RecordUnusable] = []
    new: list[tuple[Any, ...]] = []
    for opening in openings:
        try:
            require_kept(opening.turn_id, outcomes)
            if opening.next_turn_id is not None:
                require_kept(opening.next_turn_id, outcomes)
        except RecordUnusable as error:
            opened.append(error)
            continue
        policy, current, judgement, own = found[opening.turn_id]
        if judgement is not None:
            # A judgement in progress keeps its recipe, whatever the policy's recipe is by now.
            opened.append(await read_open(connection, JudgementId(judgement), own, opening.hint_kind))
        elif current is None:
            opened.append(RecordUnusable(f"policy {policy!r} has no recipe"))
        else:
            recipe = await _recipe(connection, current)
            id_ = new_judgement_id()
            opened.append(OpenJudgement(id_, recipe, {}, {}))
            digest = content_of(connection).write_digest(opening.evidence_hash)
            new.append((id_, opening.turn_id, current, opening.revision, opening.next_turn_id, digest))
    if new:
        await raw.execute(_INSERT, [list(column) for column in zip(*new, strict=True)])
    return opened


async def lock_turn(connection: AsyncConnection, turn_id: TurnId, next_turn_id: TurnId | None) -> None:
    """Lock a turn, and keep the one that holds its next state from being erased.

    Raises:
        RecordUnusable: one of them was erased.
    """
    raw = await raw_connection(connection)
    later = [] if next_turn_id is None else [next_turn_id]
    async with raw.pipeline():
        kept = await raw.execute(_KEEP, [[turn_id, *later]])
        locked = await raw.execute(_LOCK, [[turn_id]])
    outcomes: dict[UUID, str] = dict(await kept.fetchall()) | dict(await locked.fetchall())
    for one in (turn_id, *later):
        require_kept(one, outcomes)


def require_kept(turn_id: TurnId, outcomes: Mapping[UUID, str]) -> None:
    """
    Raises:
        RecordUnusable: the turn was erased.
    """
    if outcomes[turn_id] == TurnOutcome.ERASED:
        raise RecordUnusable(f"turn {turn_id} was erased")


async def _recipe(connection: AsyncConnection, recipe_hash: str) -> Recipe:
    if (known := _RECIPES.get(recipe_hash)) is None:
        known = _RECIPES[recipe_hash] = await recipe_by_hash(connection, recipe_hash)
    return known
