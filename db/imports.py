"""Stores imported turns and judgements: each with its outcome in one transaction, so that no workflow takes them up."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid5

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.contracts.sessions import SessionState
from clawloop.contracts.turns import SessionEvidence, SessionSource, TurnKind, TurnOutcome, TurnRecord
from clawloop.errors import NotFound, RecordUnusable
from clawloop.ids import ApiKeyId, TurnId, following_turn_id, new_judgement_id
from clawloop.judging.records import HINTS, VOTES
from clawloop.operations.imports import ALIAS, turn_mark
from clawloop.recipes.recipe import Recipe
from clawloop.turns.identify import named_session_id
from clawloop.turns.logged import LoggedJudgement
from db.content import content_of
from db.content_rows import answer_row
from db.database import Database, transaction
from db.exact_json import storable
from db.serving.keys import secretless_key
from db.tables import ApiKeyRow, FeedbackRow, HintRow, JudgementRow, PolicyRow, SessionRow, TurnRow, VoteRow
from db.training.recipes import insert_recipe
from db.turns.conversation_cache import ConversationCache
from db.turns.files import release_files
from db.turns.insert_batch import insert_batch
from db.turns.prepared_turn import PreparedTurn

_KEYS = UUID("5b0a3c5e-5d51-4a5e-9d5c-0c6f0f6b7a11")
# A judgement belongs to a recipe; what another system's judge said belongs to none of ours.
_RECIPE = Recipe(name="imported")


class PostgresImportStore:
    """Implements `clawloop.operations.imports.ImportStore`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._conversations = ConversationCache()

    @transaction
    async def import_key(self, connection: AsyncConnection, policy: str) -> ApiKeyId:
        there = select(PolicyRow.id).where(PolicyRow.id == storable(policy), PolicyRow.retired_at.is_(None))
        if await connection.scalar(there) is None:
            raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy")
        key = ApiKeyId(uuid5(_KEYS, policy))
        values = secretless_key(key, policy, "imported")
        await connection.execute(insert(ApiKeyRow).values(values).on_conflict_do_nothing(index_elements=["id"]))
        return key

    async def add_turn(self, record: TurnRecord, why: str) -> bool:
        prepared = PreparedTurn.checked(record, self._database.content)
        added = await self._add_turn(prepared, why)
        if added:
            self._conversations.put(record.turn_id, prepared.conversation)
        return added

    @transaction
    async def _add_turn(self, connection: AsyncConnection, turn: PreparedTurn, why: str) -> bool:
        record = turn.record
        (inserted,) = await insert_batch(connection, self._conversations, [turn])
        assert inserted is not None  # no other turn of the batch has its session
        if inserted.session_id != named_session_id(record.api_key_id, record.evidence):
            raise RecordUnusable("`id`: a turn that was not imported to this session has it")
        if inserted.duplicate or inserted.erased:
            return False
        outcome = {"outcome": TurnOutcome.NOT_TRAINABLE, "outcome_detail": why, "announced_at": func.now()}
        await connection.execute(update(TurnRow).where(TurnRow.id == record.turn_id).values(outcome))
        closed = {
            "state": SessionState.CLOSED,
            "first_closed_at": func.coalesce(SessionRow.first_closed_at, func.now()),
            "closed_at": func.clock_timestamp(),  # not before the turn was inserted
            "closed_why": "imported",
        }
        await connection.execute(update(SessionRow).where(SessionRow.id == inserted.session_id).values(closed))
        if inserted.parent_turn_id is not None:
            await _replace_next_state(connection, inserted.parent_turn_id, record.turn_id)
        return True

    @transaction
    async def add_judgement(
        self, connection: AsyncConnection, key: ApiKeyId, judgement: LoggedJudgement, reason: str
    ) -> bool:
        turn = await _judged_turn(connection, key, judgement)
        known = select(JudgementRow.id).where(JudgementRow.turn_id == turn.id).limit(1)
        if await connection.scalar(known) is not None:
            return False
        await insert_recipe(connection, _RECIPE)
        row, content = new_judgement_id(), content_of(connection)
        after = (
            select(TurnRow.id)
            .where(TurnRow.parent_turn_id == turn.id, TurnRow.outcome != TurnOutcome.ERASED)
            .order_by(TurnRow.id)
            .limit(1)
        )
        voted = [score for score, _ in judgement.votes if score is not None]
        reward = float(judgement.verdict) if judgement.reward is None and judgement.verdict else judgement.reward
        not_trainable = str(turn.outcome_detail).partition(" (")[0]
        values = {
            "id": row,
            "turn_id": turn.id,
            "recipe_hash": _RECIPE.hash,
            "revision": 0,
            "shown_by": await connection.scalar(after),
            "evidence_hash": b"",
            "verdict": judgement.verdict,
            "expected": sum(voted) / len(voted) if voted else None,
            "reward": reward,
            "verdict_why": reason,
            "hint": None
            if judgement.hint is None
            else content.write_text(storable(judgement.hint), "judgements.hint", row),
            "hint_why": "imported",
            "not_trainable": not_trainable,
            "outcome": TurnOutcome.NOT_TRAINABLE,
            "why": storable(judgement.why) if judgement.why is not None else reason,
            "decided_at": func.now(),
        }
        await connection.execute(insert(JudgementRow).values(values))
        await _insert_answers(connection, row, judgement)
        detail = f"{not_trainable} (imported; {reason})"
        await connection.execute(update(TurnRow).where(TurnRow.id == turn.id).values(outcome_detail=detail))
        return True

    @transaction
    async def is_followed(self, connection: AsyncConnection, turn: TurnId) -> bool:
        return await connection.scalar(select(TurnRow.id).where(TurnRow.parent_turn_id == turn).limit(1)) is not None


async def _replace_next_state(connection: AsyncConnection, parent: TurnId, turn: TurnId) -> None:
    """Let a turn take the place of what was known of it by the next state of its parent."""
    known = following_turn_id(parent)
    if known == turn:
        return
    shown = update(JudgementRow).where(JudgementRow.shown_by == known)
    await connection.execute(shown.values(shown_by=turn))
    rated = select(FeedbackRow.id).where(FeedbackRow.turn_id == known).exists()
    replaced = select(TurnRow.id).where(TurnRow.id == known, TurnRow.alias == ALIAS, ~rated).with_for_update()
    if (await connection.scalar(replaced)) is not None:
        await release_files(connection, [known])
        await connection.execute(delete(TurnRow).where(TurnRow.id == known))


async def _judged_turn(connection: AsyncConnection, key: ApiKeyId, judgement: LoggedJudgement) -> Any:
    """The turn that a judgement is of, locked.

    Raises:
        RecordUnusable: there is none, or it was erased.
    """
    query = (
        select(TurnRow.id, TurnRow.outcome, TurnRow.outcome_detail, TurnRow.response.is_not(None).label("replied"))
        .join(SessionRow, SessionRow.id == TurnRow.session_id)
        .where(SessionRow.api_key_id == key, TurnRow.kind == TurnKind.MAIN)
    )
    if judgement.turn_id is not None:
        query = query.where(TurnRow.id == judgement.turn_id)
    else:
        session = named_session_id(key, SessionEvidence(SessionSource.IMPORTED, judgement.session))
        query = query.where(TurnRow.session_id == session, TurnRow.kind_reason == turn_mark(judgement.number))
    newest = query.order_by(TurnRow.id.desc()).limit(1).with_for_update(of=TurnRow)
    turn = (await connection.execute(newest)).first()
    if turn is None:
        raise RecordUnusable("its turn was not imported, or was erased: import the file with the turns first")
    if turn.outcome == TurnOutcome.ERASED:
        raise RecordUnusable("its turn was erased")
    if not turn.replied:
        raise RecordUnusable("its turn has no reply")
    return turn


async def _insert_answers(connection: AsyncConnection, row: UUID, judgement: LoggedJudgement) -> None:
    content = content_of(connection)
    votes = [
        {
            "judgement_id": row,
            "kind": VOTES,
            "index": n,
            "raw": content.write_text(storable(raw), "votes.raw", answer_row(row, VOTES, n)),
            "score": score,
        }
        for n, (score, raw) in enumerate(judgement.votes)
    ]
    hints = [
        {
            "judgement_id": row,
            "kind": HINTS,
            "index": n,
            "raw": content.write_text(storable(hint.raw), "hints.raw", answer_row(row, HINTS, n)),
            "accepted": hint.accepted,
            "text": None
            if hint.text is None
            else content.write_text(storable(hint.text), "hints.text", answer_row(row, HINTS, n)),
        }
        for n, hint in enumerate(judgement.hints)
    ]
    if votes:
        await connection.execute(insert(VoteRow), votes)
    if hints:
        await connection.execute(insert(HintRow), hints)
