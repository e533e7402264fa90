"""Yardsticks of lessons in PostgreSQL: the replies that they are measured by, and the scores of these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.contracts.lessons import Lesson
from clawloop.core.contracts.training import BatchSample, VersionRef, YardstickReply, YardstickScore
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, RecordUnusable
from clawloop.core.ids import LessonId, SampleId, TurnId
from clawloop.core.lessons.practice import Practice, PracticeResult
from clawloop.core.lessons.yardstick import MOST_TRIED, NEEDED, ReplyScores
from db.content import bytes_to_changes, changes_to_bytes, content_of, exact_json, storable
from db.encryption.columns import opened
from db.tables import YardstickRow
from db.turns.read import ConversationCache, read_turn

_ERASED = "erased"  # as a reason: others are tried in the place of such replies
MOST_MEASURED = 4
"""Lessons in one step, new ones aside, those that were not measured for longest: each costs a forward pass over its
replies."""

_KEPT = text("""
    SELECT y.lesson_id, y.source_turn_id, y.turn_id, y.prompts, y.first_version, y.without, l.state
    FROM yardstick y JOIN lessons l ON l.id = y.lesson_id
    WHERE l.policy = :policy AND l.state IN ('active', 'learned') AND y.prompts IS NOT NULL
    ORDER BY y.lesson_id, y.source_turn_id
""")
_FORGET_REPLIES = text(f"UPDATE yardstick SET prompts = NULL, why = '{_ERASED}' WHERE turn_id = ANY(:turns)")
_PRACTISED_IN = text("""
    SELECT DISTINCT l.id AS lesson, m.step FROM practice p JOIN samples s ON s.turn_id = p.turn_id
        JOIN step_samples m ON m.sample_id = s.id AND m.dropped IS NULL
        JOIN steps n ON n.policy = m.policy AND n.n = m.step
        JOIN lessons l ON l.id = ANY(p.lessons)
    WHERE m.policy = :policy AND n.state = 'committed'
""")


_CORRECTED_IN = text("""
    SELECT DISTINCT l.id AS lesson, m.step FROM lessons l
        JOIN samples s ON s.turn_id = l.turn_id AND s.hinted_prompts IS NOT NULL
        JOIN step_samples m ON m.sample_id = s.id AND m.dropped IS NULL
        JOIN steps n ON n.policy = m.policy AND n.n = m.step
    WHERE l.policy = :policy AND n.state = 'committed'
""")


# Kept while a lesson is new -------------------------------------------------------------------------------------------


class Unmeasured(NamedTuple):
    """
    Args:
        lessons: those that too few replies measure, unless too many requests were tried.
        new: those of them that enough replies have never measured, erased ones included.
    """

    lessons: list[Lesson]
    new: list[Lesson]


async def read_unmeasured(connection: AsyncConnection, lessons: Sequence[Lesson]) -> Unmeasured:
    replies = (
        select(
            YardstickRow.lesson_id,
            func.count().filter(YardstickRow.why != _ERASED).label("tried"),
            func.count(YardstickRow.prompts).label("kept"),
            func.count(YardstickRow.first_version).label("scored"),
        )
        .where(YardstickRow.lesson_id.in_([lesson.id for lesson in lessons]))
        .group_by(YardstickRow.lesson_id)
    )
    rows = (await connection.execute(replies)).all()
    enough = {row.lesson_id for row in rows if row.kept >= NEEDED or row.tried >= MOST_TRIED}
    once_enough = {row.lesson_id for row in rows if row.scored >= NEEDED}
    unmeasured = [lesson for lesson in lessons if lesson.id not in enough]
    return Unmeasured(unmeasured, [lesson for lesson in unmeasured if lesson.id not in once_enough])


async def keep_reply(connection: AsyncConnection, practice: Practice, result: PracticeResult, lesson: LessonId) -> None:
    """Store a reply that the lesson is measured by, or why the request gives none; its turn must be stored."""
    turn = None if result.record is None else result.record.turn_id
    row: dict[str, Any] = {"lesson_id": lesson, "source_turn_id": practice.source.turn_id, "turn_id": turn}
    row |= {"why": storable(result.why), "without": exact_json({})}
    if turn is not None:
        prompts = changes_to_bytes(result.prompts)
        row["prompts"] = content_of(connection).write_bytes(prompts, "yardstick.prompts", turn)
    await connection.execute(insert(YardstickRow).values(row))


async def forget_replies(connection: AsyncConnection, turns: Collection[UUID]) -> None:
    """Erase what the yardstick keeps of these turns beside them, but the scores that they had: no later version is
    measured by them."""
    await connection.execute(_FORGET_REPLIES, {"turns": list(turns)})


# Scored in each step --------------------------------------------------------------------------------------------------


async def read_replies(
    connection: AsyncConnection, conversations: ConversationCache, policy: str
) -> list[YardstickReply]:
    """The replies that a step scores: of all lessons with new ones, which a later version may know, and of those that
    were not measured for longest."""
    of_lessons: defaultdict[UUID, list[Any]] = defaultdict(list)
    for row in opened(connection, await connection.execute(_KEPT, {"policy": policy}), yardstick="turn_id"):
        of_lessons[row.lesson_id].append(row)
    waits_longest = sorted(of_lessons.values(), key=lambda rows: (_newest(rows), rows[0].state, rows[0].lesson_id))
    new = [rows for rows in waits_longest if _has_new(rows)]
    others = [rows for rows in waits_longest if not _has_new(rows)]
    chosen = [*new, *others[:MOST_MEASURED]]
    read = [await _read(connection, conversations, row) for rows in chosen for row in rows]
    return [reply for reply in read if reply is not None]


async def _read(connection: AsyncConnection, conversations: ConversationCache, row: Any) -> YardstickReply | None:
    with suppress(ContentUnreadable, EncryptionKeyMissing, RecordUnusable):  # a step goes on without it
        stored = await read_turn(connection, conversations, TurnId(row.turn_id))
        if stored is None or not (record := stored.record).prompt_ids or not record.response_ids:
            return None
        taught = BatchSample(
            sample_id=SampleId(row.turn_id),
            prompt_ids=record.prompt_ids,
            response_ids=record.response_ids,
            logprobs=record.logprobs or (),
            temperature=float(str(record.sampling["temperature"])),
            version=record.version,
            reward=None,
        )
        plain = bytes_to_changes(row.prompts)[0].of(record.prompt_ids)
        return YardstickReply(taught, replace(taught, prompt_ids=plain), new=row.first_version is None)
    return None


def _has_new(rows: Sequence[Any]) -> bool:
    return any(row.first_version is None for row in rows)


def _newest(rows: Sequence[Any]) -> int:
    """The newest version that the lesson was measured in; −1: in none."""
    return max((int(version) for row in rows for version in row.without), default=-1)


async def keep_scores_of_replies(
    connection: AsyncConnection, version: VersionRef, scores: Sequence[YardstickScore]
) -> None:
    """Store what a step found; the policy must be locked."""
    for score in scores:
        row = YardstickRow.turn_id == score.reply
        known = select(YardstickRow.first_version, YardstickRow.without).where(row)
        stored = (await connection.execute(known)).one_or_none()
        if stored is None:
            continue
        is_new = stored.first_version is None
        if is_new and score.version is None:
            unusable = {"prompts": None, "why": "longer than the trainer can read"}
            await connection.execute(update(YardstickRow).where(row).values(unusable))
        if score.version is None or (is_new and (score.taught is None or score.plain is None)):
            continue
        found = stored.without | {str(version.n): score.version}
        values: dict[str, Any] = {}
        if is_new:
            found[str(version.parent)] = score.plain
            values = {"first_version": version.parent, "with_lesson": score.taught}
        await connection.execute(update(YardstickRow).where(row).values(without=exact_json(found), **values))


# Read -----------------------------------------------------------------------------------------------------------------


async def read_scores(connection: AsyncConnection, lessons: Sequence[LessonId]) -> dict[LessonId, list[ReplyScores]]:
    """By lesson, the scores of its replies, without those that were not scored yet; erased replies keep theirs."""
    query = select(
        YardstickRow.lesson_id, YardstickRow.first_version, YardstickRow.with_lesson, YardstickRow.without
    ).where(YardstickRow.lesson_id.in_(lessons), YardstickRow.first_version.is_not(None))
    found: defaultdict[LessonId, list[ReplyScores]] = defaultdict(list)
    for row in await connection.execute(query):
        without = {int(version): logprob for version, logprob in row.without.items()}
        found[LessonId(row.lesson_id)].append(ReplyScores(row.first_version, row.with_lesson, without))
    return found


async def read_practised_in(
    connection: AsyncConnection, policy: str, *, corrected: bool = False
) -> dict[LessonId, set[int]]:
    """By lesson, the versions whose step had samples that it taught.

    Args:
        corrected: or one of the correction that it was taken from.
    """
    found: defaultdict[LessonId, set[int]] = defaultdict(set)
    for query in (_PRACTISED_IN, _CORRECTED_IN) if corrected else (_PRACTISED_IN,):
        for row in await connection.execute(query, {"policy": policy}):
            found[LessonId(row.lesson)].add(row.step)
    return found
