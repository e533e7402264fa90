"""Practice in PostgreSQL: which request is next, and its turn, with its sample or for a lesson's yardstick."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.lessons import Lesson, ShownLesson
from clawloop.core.contracts.turns import MatchedBy, TurnOutcome, TurnRecord
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, RecipeRejected, RecordUnusable
from clawloop.core.ids import SessionId, TurnId, new_judgement_id
from clawloop.core.lessons.practice import NEWEST, Practice, PracticeResult
from clawloop.core.recipes.recipe import Recipe, held_out_share, parse_stored_recipe
from clawloop.core.samples.decision import is_held_out
from db.content import content_of, storable
from db.database import Database, PostgresStore, raw_connection, transaction
from db.lessons.ledger import read_lessons
from db.lessons.yardstick import Unmeasured, keep_reply, read_unmeasured
from db.tables import JudgementRow, PracticeRow, TurnRow, YardstickRow
from db.training.claims import expire_practised, read_closed
from db.training.policies import lock_policy
from db.training.samples import SamplePlace, insert_sample
from db.training.work_flag import refresh_work_flag
from db.turns.insert import insert_rows
from db.turns.prepared_turn import PreparedTurn
from db.turns.read import ConversationCache, read_turn
from db.turns.session_lookup import Entry

_POLICY = text("""
    SELECT p.active, r.content FROM policies p JOIN recipes r ON r.hash = p.recipe_hash
    WHERE p.id = :policy AND p.paused_reason IS NULL AND p.retired_at IS NULL
""")
_WAITING = text("""
    SELECT count(*) FROM samples s JOIN practice p ON p.turn_id = s.turn_id
    WHERE s.policy = :policy AND s.state IN ('fresh', 'claimed')
""")
# One of the replies to a request stands for all.
_NEWEST = """
    SELECT t.id, t.session_id, t.group_id FROM (
        SELECT o.* FROM (
            SELECT id FROM sessions WHERE policy = :policy ORDER BY last_turn_at DESC LIMIT :newest) c
        CROSS JOIN LATERAL (
            SELECT * FROM turns WHERE session_id = c.id AND kind = 'main' AND episode_id IS NULL AND choice = 0
            ORDER BY id DESC LIMIT :newest) o
        ORDER BY o.id DESC LIMIT :newest) t
    WHERE t.status IN ('complete', 'length') AND t.outcome <> 'erased'"""
# Whether its reply has a sample is known: with a lesson in its prompt it has none.
_KNOWN = "(t.lessons IS NOT NULL OR t.outcome <> 'waiting')"
_UNPRACTISED = text(f"""{_NEWEST}
        AND NOT EXISTS (
            SELECT FROM practice p WHERE p.source_turn_id = t.id AND p.lessons = CAST(:lessons AS uuid[]))
        AND NOT EXISTS (SELECT FROM yardstick y WHERE y.source_turn_id = t.id AND y.turn_id IS NOT NULL)
        AND ({_KNOWN} OR NOT :measuring)
    ORDER BY t.id DESC
""")
# No step has trained or will train a reply to it, as far as it is known.
_MEASURING = text(f"""{_NEWEST}
        AND {_KNOWN}
        AND NOT EXISTS (SELECT FROM samples s WHERE s.turn_id = t.id AND s.state <> 'held_out')
        AND NOT EXISTS (SELECT FROM practice p WHERE p.source_turn_id = t.id AND p.turn_id IS NOT NULL)
        AND NOT EXISTS (SELECT FROM yardstick y WHERE y.source_turn_id = t.id AND y.lesson_id = :lesson)
    ORDER BY t.id DESC
""")


class PostgresPracticeStore(PostgresStore):
    """Satisfies `activities.practice.PracticeStore`.

    Args:
        conversations: shared with other stores on the same PostgreSQL.
    """

    def __init__(self, database: Database, conversations: ConversationCache | None = None) -> None:
        super().__init__(database)
        self._conversations = conversations or ConversationCache()

    @transaction
    async def next(self, connection: AsyncConnection, policy: str) -> Practice | None:
        found = (await connection.execute(_POLICY, {"policy": policy})).one_or_none()
        if found is None:
            return None
        recipe = _practising(found.content)
        if recipe is None or await read_closed(connection, policy, recipe) is not None:
            return None
        lessons = await _read_lessons(connection, policy, recipe)
        share = held_out_share(found.content)
        parameters = {"policy": policy, "newest": NEWEST}
        # What is held out is never trained, and versions are compared on it; a lesson is measured by it before others.
        for lesson in lessons.unmeasured:
            rows = (await connection.execute(_MEASURING, parameters | {"lesson": lesson.id})).all()
            held_out_first = sorted(rows, key=lambda row: not _is_held_out(policy, row, share))
            if (source := await self._first_readable(connection, held_out_first)) is not None:
                return Practice(source, _shown(lessons.shown), found.active, recipe, lesson.id)
        taught = lessons.taught
        if not taught or not (
            await _has_room(connection, policy, recipe) or await _makes_room(connection, policy, recipe)
        ):
            return None
        # A request that a new lesson may be measured by once it is judged is left to it.
        parameters |= {"lessons": _set_of(taught), "measuring": bool(lessons.unmeasured)}
        rows = (await connection.execute(_UNPRACTISED, parameters)).all()
        source = await self._first_readable(connection, [row for row in rows if not _is_held_out(policy, row, share)])
        return None if source is None else Practice(source, _shown(taught), found.active, recipe)

    @transaction
    async def keep(self, connection: AsyncConnection, practice: Practice, result: PracticeResult) -> str | None:
        policy, source = practice.source.policy, practice.source.turn_id
        locked = await lock_policy(connection, policy)
        lessons = await _read_lessons(connection, policy, practice.recipe)
        practised = _set_of(practice.lessons)
        own = select(TurnRow.session_id, TurnRow.parent_turn_id, TurnRow.matched_by, TurnRow.outcome)
        turn = (await connection.execute(own.where(TurnRow.id == source))).one()
        if (
            locked.recipe_hash != practice.recipe.hash
            or practised != _set_of(lessons.taught if practice.measured is None else lessons.shown)
            or turn.outcome == TurnOutcome.ERASED
            or await _is_known(connection, practice)
        ):
            return None
        if result.record is not None:
            await self._insert_turn(connection, result.record, turn)
        if practice.measured is not None:
            await keep_reply(connection, practice, result, practice.measured)
            return None
        row = {"source_turn_id": source, "lessons": practised, "why": storable(result.why)}
        row["turn_id"] = None if result.record is None else result.record.turn_id
        await connection.execute(insert(PracticeRow).values(row))
        if result.record is None:
            return None
        # A request for several replies is held out, or not, as a group: `next` chose it by that.
        held_out = practice.recipe.gate.held_out
        place = SamplePlace(policy, SessionId(turn.session_id), practice.source.group_id, held_out)
        await _insert_sample(connection, practice, result, result.record.turn_id, place)
        return policy if await refresh_work_flag(connection, policy) else None

    async def _first_readable(self, connection: AsyncConnection, rows: Iterable[Any]) -> TurnRecord | None:
        for row in rows:
            with suppress(ContentUnreadable, EncryptionKeyMissing, RecordUnusable):  # practice goes on without it
                if (stored := await read_turn(connection, self._conversations, TurnId(row.id))) is not None:
                    return stored.record
        return None

    async def _insert_turn(self, connection: AsyncConnection, record: TurnRecord, source: Any) -> None:
        """Insert a turn beside that whose request it repeats: with its session and parent."""
        prepared = PreparedTurn.checked(record, content_of(connection))
        entry = Entry(0, prepared, source.session_id, unmatched=False)
        if source.parent_turn_id is not None:
            entry.parent, entry.matched_by = TurnId(source.parent_turn_id), MatchedBy(source.matched_by)
            with suppress(ContentUnreadable, EncryptionKeyMissing):  # then the turn is stored whole
                entry.parent_conversation = await self._conversations.load(connection, entry.parent)
        await insert_rows(await raw_connection(connection), [entry])


class _Lessons(NamedTuple):
    """
    Args:
        shown: those that a prompt would hold now.
        unmeasured: those of them that are to be measured.
        new: those of these that are to be measured before a version learns them.
    """

    shown: list[Lesson]
    unmeasured: list[Lesson]
    new: list[Lesson]

    @property
    def taught(self) -> list[Lesson]:
        """Those that are practised: a new lesson does not keep the others from being learned."""
        return [lesson for lesson in self.shown if lesson not in self.new]


async def _read_lessons(connection: AsyncConnection, policy: str, recipe: Recipe) -> _Lessons:
    shown = (await read_lessons(connection, policy)).shown
    unmeasured = await read_unmeasured(connection, shown) if recipe.lessons.retire and shown else Unmeasured([], [])
    return _Lessons(shown, unmeasured.lessons, unmeasured.new)


async def _insert_sample(
    connection: AsyncConnection, practice: Practice, result: PracticeResult, turn_id: TurnId, place: SamplePlace
) -> None:
    judgement, content = new_judgement_id(), content_of(connection)
    texts = " ".join(lesson.text for lesson in practice.lessons)
    identity = b"".join(lesson.bytes for lesson in _set_of(practice.lessons))
    decided = {
        "id": judgement,
        "turn_id": turn_id,
        "recipe_hash": practice.recipe.hash,
        "revision": 0,
        "evidence_hash": content.write_digest(sha256(identity).digest()),
        "hint": content.write_text(texts, "judgements.hint", judgement),
        "hint_why": storable(result.why),
        "outcome": TurnOutcome.SAMPLED,
        "why": storable(result.why),
        "decided_at": func.now(),
    }
    await connection.execute(insert(JudgementRow).values(decided))
    await insert_sample(connection, judgement, turn_id, None, result.prompts, result.why, place)


async def _is_known(connection: AsyncConnection, practice: Practice) -> bool:
    """True if the request was practised, or a lesson is measured by it, so that it is not to be kept for the other."""
    source, practised = practice.source.turn_id, _set_of(practice.lessons)
    trained = (PracticeRow.lessons == practised) if practice.measured is None else PracticeRow.turn_id.is_not(None)
    known = select(PracticeRow.why).where(PracticeRow.source_turn_id == source, trained)
    if (await connection.execute(known)).first() is not None:
        return True
    kept = (
        YardstickRow.turn_id.is_not(None) if practice.measured is None else YardstickRow.lesson_id == practice.measured
    )
    measuring = select(YardstickRow.why).where(YardstickRow.source_turn_id == source, kept)
    return (await connection.execute(measuring)).first() is not None


async def _has_room(connection: AsyncConnection, policy: str, recipe: Recipe) -> bool:
    waiting = await connection.scalar(_WAITING, {"policy": policy}) or 0
    return waiting < recipe.train.batch_samples


async def _makes_room(connection: AsyncConnection, policy: str, recipe: Recipe) -> bool:
    """End the samples that became stale while steps had enough of users' samples; True if that makes room."""
    head = (await lock_policy(connection, policy)).head
    await expire_practised(connection, policy, recipe, head)
    await refresh_work_flag(connection, policy)
    return await _has_room(connection, policy, recipe)


def _practising(content: Any) -> Recipe | None:
    """The recipe, if it has lessons practised and can be used."""
    try:
        recipe = parse_stored_recipe(content)
    except RecipeRejected:
        return None
    return recipe if recipe.lessons.enabled and recipe.lessons.practice else None


def _is_held_out(policy: str, request: Any, share: float) -> bool:
    return is_held_out(policy, request.group_id or request.session_id, share)


def _shown(lessons: Iterable[Lesson]) -> tuple[ShownLesson, ...]:
    return tuple(lesson.shown for lesson in lessons)


def _set_of(lessons: Iterable[Lesson | ShownLesson]) -> list[UUID]:
    return sorted(lesson.id for lesson in lessons)
