"""Lessons in PostgreSQL: typed or taken from corrections, turned off and on, superseded, and erased for good."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import JsonValue
from sqlalchemy import ScalarSelect, func, insert, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.core.algorithms.rewards import path_to_base
from clawloop.core.contracts.lessons import (
    IN_FORCE,
    NOWHERE,
    Correction,
    Finding,
    Forgotten,
    LearnedIn,
    Lesson,
    LessonSource,
    LessonState,
    PolicyLessons,
    ShownLesson,
    Yardstick,
)
from clawloop.core.contracts.training import SampleState
from clawloop.core.contracts.turns import TurnKind, TurnOutcome
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, NotFound, StateConflict
from clawloop.core.ids import LessonId, SampleId, TurnId, new_lesson_id
from clawloop.core.lessons.ledger import (
    MOST_LESSONS,
    MOST_LISTED,
    MOST_SHOWN,
    LessonBook,
    digest_of,
    read_lesson,
    require_change,
)
from clawloop.core.lessons.yardstick import read_yardstick, why_grown, why_learned
from clawloop.core.recipes.lessons import Lessons
from clawloop.core.samples.decision import LESSON_ERASED, PREFIX
from db.content import content_of
from db.database import PostgresStore, transaction
from db.encryption.columns import opened
from db.lessons.yardstick import forget_replies, read_practised_in, read_scores
from db.tables import LessonRow, PolicyRow, VersionRow
from db.training.policies import insert_event, lock_policy, notify_directory, read_parents, require_policy
from db.training.samples import end_samples
from db.training.work_flag import refresh_work_flag

_SETTINGS = text("""
    SELECT p.id, r.content->'lessons' AS lessons FROM policies p JOIN recipes r ON r.hash = p.recipe_hash
    WHERE p.retired_at IS NULL AND (CAST(:policy AS text) IS NULL OR p.id = :policy)
        AND (r.content->'lessons'->>'enabled' = 'true' OR CAST(:policy AS text) IS NOT NULL)
    ORDER BY p.id
""")
_LISTED = text(f"""
    SELECT * FROM (
        SELECT l.*, row_number() OVER (
            PARTITION BY l.policy ORDER BY l.state IN ('active', 'learned') DESC, l.changed_at DESC, l.id DESC
        ) AS place
        FROM lessons l WHERE l.policy = ANY(:policies) AND l.state <> 'erased') placed
    WHERE place <= {MOST_LISTED} ORDER BY id
""")
TURNS_WITH = "(SELECT count(*) FROM turns t WHERE t.lessons @> ARRAY[l.id] AND t.kind <> 'practice')"
"""SQL for how many turns were answered with lesson `l`."""
PRACTISED_WITH = "(SELECT count(*) FROM practice p WHERE p.lessons @> ARRAY[l.id] AND p.turn_id IS NOT NULL)"
"""SQL for how many requests were practised with lesson `l`."""
_SHOWN = text(f"""
    SELECT l.id, source.session_id, {TURNS_WITH} AS turns, {PRACTISED_WITH} AS practised
    FROM lessons l LEFT JOIN turns source ON source.id = l.turn_id
    WHERE l.id = ANY(:lessons) AND l.state <> 'erased'
""")
# Turns that held a lesson share no part of their prompts with turns that did not, so that no other prompt loses
# anything (db/turns/read.py).
_FORGET_PROMPTS = text(f"""
    UPDATE turns SET prompt_ids = NULL, prompt_shared = NULL,
        outcome = CASE WHEN kind = 'main' AND outcome <> 'waiting' THEN '{TurnOutcome.NOT_TRAINABLE}' ELSE outcome END,
        outcome_detail = CASE WHEN kind = 'main' AND outcome <> 'waiting' THEN '{PREFIX}{LESSON_ERASED}'
            ELSE outcome_detail END
    WHERE lessons && CAST(:lessons AS uuid[]) AND outcome <> 'erased' RETURNING id, kind
""")
# A turn that held a lesson has no sample; the turn that the lesson came from has one taught by the same words.
_UNCLAIMED = text("""
    SELECT id FROM samples
    WHERE state IN ('fresh', 'held_out') AND hinted_prompts IS NOT NULL AND turn_id = ANY(:turns)
""")
# When a correction was said; a gateway whose clock is ahead would name a time to come.
_SAID_AT = text("""
    SELECT coalesce(
        (SELECT least(started_at, entered_at) FROM turns WHERE id = :shown_by),
        (SELECT max(received_at) FROM feedback WHERE turn_id = :turn AND text IS NOT NULL), now())
""")
# A judge's hint is not what the user said, which stays in its conversation. A judgement that is under way goes on.
_HINTED = """id IN (
    SELECT j.id FROM judgements j JOIN lessons l ON l.turn_id = j.turn_id
    WHERE l.id = ANY(:lessons) AND l.source = 'hint' AND j.decided_at IS NOT NULL)"""
_FORGET_HINTS = tuple(
    text(statement)
    for statement in (
        f"UPDATE judgements SET hint = 'erased' WHERE hint IS NOT NULL AND {_HINTED}",
        f"UPDATE hints SET raw = '', accepted = NULL, text = NULL WHERE judgement_{_HINTED}",
        f"UPDATE samples SET hinted_prompts = '' WHERE hinted_prompts IS NOT NULL AND judgement_{_HINTED}",
    )
)
# The lessons are in no prompt of a practised request, but in that which its teacher reads, and in its judgement.
_OF_PRACTICE = "turn_id IN (SELECT turn_id FROM practice WHERE lessons && CAST(:lessons AS uuid[]))"
_UNCLAIMED_PRACTICE = text(f"SELECT id FROM samples WHERE state = 'fresh' AND {_OF_PRACTICE}")
_FORGET_PRACTICE = tuple(
    text(statement)
    for statement in (
        f"UPDATE samples SET hinted_prompts = '' WHERE hinted_prompts IS NOT NULL AND {_OF_PRACTICE}",
        f"UPDATE judgements SET hint = 'erased' WHERE hint IS NOT NULL AND {_OF_PRACTICE}",
    )
)


class PostgresLessonStore(PostgresStore):
    """Implements `clawloop.operations.lessons.LessonStore`."""

    @transaction
    async def book(self, connection: AsyncConnection, policy: str) -> LessonBook:
        await require_policy(connection, policy)
        return await _read_book(connection, policy)

    @transaction
    async def ids(self, connection: AsyncConnection, policy: str) -> list[LessonId]:
        await require_policy(connection, policy)
        kept = select(LessonRow.id).where(LessonRow.policy == policy, LessonRow.state != LessonState.ERASED)
        return [LessonId(lesson) for lesson in await connection.scalars(kept.order_by(LessonRow.id))]

    @transaction
    async def add(
        self, connection: AsyncConnection, policy: str, written: str, instead_of: LessonId | None = None
    ) -> Lesson:
        said = read_lesson(written)
        await _lock(connection, policy)
        before = None if instead_of is None else await _read(connection, policy, instead_of)
        if before is not None:
            require_change(before, LessonState.SUPERSEDED)
        same = await _same(connection, policy, said)
        if same is not None and before is not None and same.id == before.id:
            return same  # nothing was changed but spelling
        if same is None:
            added = await _insert(connection, policy, said, LessonSource.TYPED, "typed", in_place_of=before)
        elif same.state is LessonState.ACTIVE:
            added = same.id
        else:
            await _change(connection, policy, same, LessonState.ACTIVE, "typed again", in_place_of=before)
            added = same.id
        if before is not None:
            await _change(connection, policy, before, LessonState.SUPERSEDED, "replaced by another lesson", added)
        return await _read(connection, policy, added)

    @transaction
    async def change(
        self, connection: AsyncConnection, policy: str, lesson: LessonId, to: LessonState, why: str
    ) -> Lesson:
        await _lock(connection, policy)
        await _change(connection, policy, await _read(connection, policy, lesson), to, why)
        return await _read(connection, policy, lesson)

    @transaction
    async def forget(self, connection: AsyncConnection, policy: str, lesson: LessonId) -> Forgotten:
        await require_policy(connection, policy)
        row = await lock_policy(connection, policy)  # a retired one has words of its user all the same
        require_change(await _read(connection, policy, lesson), LessonState.ERASED)
        turns = await erase_lessons(connection, policy, [lesson], "forgotten")
        await refresh_work_flag(connection, policy)
        found = (await _read_learned_in(connection, policy)).get(lesson, NOWHERE)
        return Forgotten(turns, found if row.retired_at is None else found._replace(before=None))


# In the caller's transaction ------------------------------------------------------------------------------------------


async def read_lessons(connection: AsyncConnection, policy: str) -> LessonBook:
    """The lessons of a policy that exists, and how its recipe shows them; without what is counted and measured."""
    settings = (await connection.execute(_SETTINGS, {"policy": policy})).one_or_none()
    rows = opened(connection, await connection.execute(_LISTED, {"policies": [policy]}), lessons="id")
    lessons = tuple(_lesson(row) for row in rows)
    return LessonBook(_settings(None if settings is None else settings.lessons), lessons)


async def _read_book(connection: AsyncConnection, policy: str) -> LessonBook:
    """As `read_lessons`, with what is counted and measured."""
    book = await read_lessons(connection, policy)
    ids = [one.id for one in book.lessons]
    found = {row.id: row for row in await connection.execute(_SHOWN, {"lessons": ids})}
    active = await connection.scalar(select(PolicyRow.active).where(PolicyRow.id == policy)) or 0
    path = path_to_base(active, await read_parents(connection, policy))
    measured = await _read_yardsticks(connection, policy, path, book.lessons)
    learned_in = await _read_learned_in(connection, policy)
    lessons = tuple(
        replace(
            one,
            turns=int(found[one.id].turns),
            practised=int(found[one.id].practised),
            session_id=found[one.id].session_id,
            yardstick=measured[one.id],
            learned_in=learned_in.get(one.id, NOWHERE),
        )
        for one in book.lessons
        if one.id in found  # else it was erased meanwhile
    )
    return replace(book, lessons=lessons)


async def read_policy_lessons(connection: AsyncConnection) -> dict[str, PolicyLessons]:
    """By policy, the lessons of those whose recipe has lessons on.

    A lesson that cannot be decrypted is left out: chats go on without it.
    """
    rows = await connection.execute(_SETTINGS, {"policy": None})
    settings = {row.id: _settings(row.lessons) for row in rows}
    if not settings:
        return {}
    lessons: dict[str, list[Lesson]] = {policy: [] for policy in settings}
    for row in opened(connection, await connection.execute(_LISTED, {"policies": list(settings)}), lessons="id"):
        if (lesson := _lesson(row)).text:
            lessons[row.policy].append(lesson)
    found = {}
    for policy, known in lessons.items():
        shown = LessonBook(settings[policy], tuple(known)).shown
        found[policy] = PolicyLessons(tuple(one.id for one in shown), {one.id: one.text for one in known})
    return found


async def read_lessons_in_force(connection: AsyncConnection, policy: str) -> list[ShownLesson]:
    """The newest lessons that are active or learned, at most as many as a prompt may hold, oldest first."""
    kept = select(LessonRow.__table__).where(LessonRow.policy == policy, LessonRow.state.in_(IN_FORCE))
    newest = await connection.execute(kept.order_by(LessonRow.id.desc()).limit(MOST_SHOWN))
    lessons = [_lesson(row).shown for row in opened(connection, newest, lessons="id")]
    return [lesson for lesson in reversed(lessons) if lesson.text]


async def add_correction(
    connection: AsyncConnection, policy: str, correction: Correction, turn_id: TurnId, shown_by: TurnId | None
) -> None:
    """Make a lesson of a correction, unless one that says the same is there in any state, or the policy has as many in
    force as it can have. The policy must be locked.

    A learned lesson that says the same is active again: what was learned does not hold. So is one that was superseded:
    the user changed back. A turn whose own lesson is learned, superseded, off or forgotten brings none any more. Words
    that are judged late or again change no lesson whose state is newer than they are.

    Args:
        turn_id: the turn that was corrected.
        shown_by: the turn that holds the correction; None: a comment does.
    """
    # In other words, too: the judge of hints words one anew each time.
    own = select(LessonRow.id).where(LessonRow.turn_id == turn_id, LessonRow.state != LessonState.ACTIVE)
    if (await connection.execute(own)).first() is not None:
        return
    same = await _same(connection, policy, correction.text)
    if correction.repeats is not None and (same is None or same.state is LessonState.SUPERSEDED):
        same = await _read(connection, policy, correction.repeats)
    before = None if correction.replaces is None else await _read(connection, policy, correction.replaces)
    said_at = await connection.scalar(_SAID_AT, {"turn": turn_id, "shown_by": shown_by})
    # A state that the user's words set began when they were said, so that words said in turn count in that order,
    # whenever a judge gets to them.
    if any(lesson is not None and said_at <= lesson.changed_at for lesson in (same, before)):
        return
    # Nothing is left that tells a forgotten lesson by its words: any that were said before it went may be its own.
    forgotten = select(func.max(LessonRow.changed_at)).where(
        LessonRow.policy == policy, LessonRow.state == LessonState.ERASED
    )
    if same is None and (last := await connection.scalar(forgotten)) is not None and said_at <= last:
        return
    is_full = await _is_full(connection, policy, in_place_of=before)
    if same is None and not is_full:
        why = "taken from a hint" if correction.source is LessonSource.HINT else "taken from the user's own words"
        taken_from = (turn_id, shown_by)
        newer = await _insert(connection, policy, correction.text, correction.source, why, taken_from, before, said_at)
    elif same is not None and (
        same.state is LessonState.LEARNED or (same.state is LessonState.SUPERSEDED and not is_full)
    ):
        why = f"{same.state.value}, and the user asked for it again"
        await _change(connection, policy, same, LessonState.ACTIVE, why, in_place_of=before, at=said_at)
        newer = same.id
    else:
        return
    if before is not None and before.state in IN_FORCE:
        why = "the judge found that a newer correction takes its place"
        await _change(connection, policy, before, LessonState.SUPERSEDED, why, newer, at=said_at)


async def follow_version(connection: AsyncConnection, policy: str, active: int) -> None:
    """Have lessons leave the prompt that this version has learned, and those come back that it has not.

    Args:
        active: the version that answers from now on; the policy must be locked.
    """
    kept = select(LessonRow.__table__).where(LessonRow.policy == policy, LessonRow.state.in_(IN_FORCE))
    rows = (await connection.execute(kept.order_by(LessonRow.id))).all()
    if not rows:
        return
    path = path_to_base(active, await read_parents(connection, policy))
    settings = (await connection.execute(_SETTINGS, {"policy": policy})).one_or_none()
    retires = settings is not None and _settings(settings.lessons).retire
    lessons = [_lesson(row, said="") for row in rows]
    measured = await _read_yardsticks(connection, policy, path, lessons)
    for lesson in lessons:
        found, since = measured[lesson.id], lesson.since_version
        if lesson.state is LessonState.LEARNED:
            if since not in path:
                why = f"version {since}, which had learned it, does not answer any more: version {active} does"
                # What that version says still holds: when it answers again, the lesson is learned since then.
                await _change(connection, policy, lesson, LessonState.ACTIVE, why, since=since - 1)
            elif found.finding is Finding.GROWN:
                await _change(connection, policy, lesson, LessonState.ACTIVE, why_grown(found))
            elif found.finding is Finding.NOT_MEASURED or not retires:
                why = "whether it is still learned is not measured any more"
                await _change(connection, policy, lesson, LessonState.ACTIVE, why)
        elif retires and found.finding is Finding.LEARNED:
            learned, *_ = found.learned_by
            await _change(connection, policy, lesson, LessonState.LEARNED, why_learned(found), since=learned.version)


async def lessons_from(connection: AsyncConnection, turns: Collection[TurnId]) -> list[LessonId]:
    """The lessons whose words these turns hold."""
    source = or_(LessonRow.turn_id.in_(turns), LessonRow.shown_by.in_(turns))
    query = select(LessonRow.id).where(source, LessonRow.state != LessonState.ERASED)
    return [LessonId(lesson) for lesson in await connection.scalars(query.order_by(LessonRow.id))]


async def erase_lessons(connection: AsyncConnection, policy: str, lessons: Sequence[LessonId], why: str) -> int:
    """Erase the text of lessons, and the prompts of all turns that held one; the number of these turns.

    Samples that no step has, and that the same words or the lessons teach, expire. The policy must be locked.
    """
    rows = update(LessonRow).where(LessonRow.id.in_(lessons)).returning(LessonRow.turn_id)
    gone = rows.values(state=LessonState.ERASED, text="", digest=None, why=why, changed_at=func.now())
    sources = [turn for turn in await connection.scalars(gone) if turn is not None]
    forgotten = (await connection.execute(_FORGET_PROMPTS, {"lessons": list(lessons)})).all()
    held = [turn.id for turn in forgotten if turn.kind != TurnKind.PRACTICE]
    await forget_replies(connection, [turn.id for turn in forgotten])
    samples = await connection.scalars(_UNCLAIMED, {"turns": sources})
    reasons = {SampleId(sample): LESSON_ERASED for sample in samples}
    await end_samples(connection, reasons, SampleState.EXPIRED, TurnOutcome.EXPIRED)
    await _expire_practice(connection, lessons, LESSON_ERASED)
    for statement in (*_FORGET_HINTS, *_FORGET_PRACTICE):
        await connection.execute(statement, {"lessons": list(lessons)})
    for lesson in lessons:
        await _tell(connection, policy, lesson, LessonState.ERASED, why, turns=len(held))
    return len(held)


async def _lock(connection: AsyncConnection, policy: str) -> None:
    await require_policy(connection, policy)
    if (await lock_policy(connection, policy)).retired_at is not None:
        raise StateConflict(f"Policy {policy!r} is retired: it answers no more.", code="policy_retired", field="policy")


async def _read(connection: AsyncConnection, policy: str, lesson: LessonId) -> Lesson:
    query = select(LessonRow.__table__).where(LessonRow.policy == policy, LessonRow.id == lesson)
    rows = list(opened(connection, await connection.execute(query), lessons="id"))
    if not rows:
        raise NotFound(
            f"policy {policy!r} has no lesson {lesson}; `clawloop lesson list` shows them",
            code="lesson_not_found",
            field="lesson",
        )
    return _lesson(rows[0])


async def _same(connection: AsyncConnection, policy: str, said: str) -> Lesson | None:
    """The lesson with the same words."""
    digests = list(content_of(connection).find_digests([digest_of(said)]))
    query = select(LessonRow.id).where(LessonRow.policy == policy, LessonRow.digest.in_(digests))
    found = await connection.scalar(query)
    return None if found is None else await _read(connection, policy, LessonId(found))


async def _read_yardsticks(
    connection: AsyncConnection, policy: str, path: Sequence[int], lessons: Sequence[Lesson]
) -> dict[LessonId, Yardstick]:
    """What is known of the effect of each of these lessons, on the path from a version to the base model."""
    scores = await read_scores(connection, [one.id for one in lessons])
    practised_in = await read_practised_in(connection, policy) if scores else {}
    return {
        one.id: read_yardstick(
            one.state, one.since_version, scores.get(one.id, []), path, practised_in.get(one.id, set())
        )
        for one in lessons
    }


async def _read_learned_in(connection: AsyncConnection, policy: str) -> dict[LessonId, LearnedIn]:
    """By lesson, the versions on the head's path that learned from its samples, or came after one that did."""
    head = await connection.scalar(select(PolicyRow.head).where(PolicyRow.id == policy)) or 0
    parents = await read_parents(connection, policy)
    path = sorted(path_to_base(head, parents))
    with_files = select(VersionRow.n).where(VersionRow.policy == policy, VersionRow.removed_at.is_(None))
    kept = set(await connection.scalars(with_files))
    found = {}
    for lesson, learned in (await read_practised_in(connection, policy, corrected=True)).items():
        if (first := min(learned.intersection(path), default=None)) is not None:
            before = max((version for version in path if version < first and version in kept), default=0)
            found[lesson] = LearnedIn(tuple(version for version in path if version >= first), before)
    return found


async def _is_full(connection: AsyncConnection, policy: str, *, in_place_of: Lesson | None) -> bool:
    """True if the policy can have no more lessons in force.

    Args:
        in_place_of: the lesson that another one is to take the place of.
    """
    in_force = select(func.count()).where(LessonRow.policy == policy, LessonRow.state.in_(IN_FORCE))
    leaves = in_place_of is not None and in_place_of.state in IN_FORCE
    return (await connection.scalar(in_force) or 0) - leaves >= MOST_LESSONS


async def _require_room(connection: AsyncConnection, policy: str, field: str, *, in_place_of: Lesson | None) -> None:
    if await _is_full(connection, policy, in_place_of=in_place_of):
        raise StateConflict(
            f"Policy {policy!r} has {MOST_LESSONS} active and learned lessons and can have no more: turn some off with"
            " `clawloop lesson off`, or forget them.",
            code="too_many_lessons",
            field=field,
        )


async def _insert(
    connection: AsyncConnection,
    policy: str,
    said: str,
    source: LessonSource,
    why: str,
    taken_from: tuple[TurnId | None, TurnId | None] = (None, None),
    in_place_of: Lesson | None = None,
    at: datetime | None = None,
) -> LessonId:
    """
    Args:
        at: when the words were said; None: now.
    """
    await _require_room(connection, policy, "text", in_place_of=in_place_of)
    lesson, content = new_lesson_id(), content_of(connection)
    row: dict[str, Any] = {
        "id": lesson,
        "policy": policy,
        "text": content.write_text(said, "lessons.text", lesson),
        "digest": content.write_digest(digest_of(said)),
        "state": LessonState.ACTIVE,
        "why": why,
        "source": source,
        "turn_id": taken_from[0],
        "shown_by": taken_from[1],
        "since_version": _active(policy),
        "changed_at": at or func.now(),
    }
    await connection.execute(insert(LessonRow).values(row))
    await _tell(connection, policy, lesson, LessonState.ACTIVE, why)
    return lesson


async def _change(
    connection: AsyncConnection,
    policy: str,
    lesson: Lesson,
    to: LessonState,
    why: str,
    superseded_by: LessonId | None = None,
    since: int | None = None,
    in_place_of: Lesson | None = None,
    at: datetime | None = None,
) -> None:
    """
    Args:
        since: the version since which a lesson is learned; of one that is not, the newest version that says nothing
            against it; None: the active version.
        in_place_of: the lesson that it is to take the place of.
        at: when the words were said that ask for it; None: now.
    """
    if lesson.state is to:
        return
    require_change(lesson, to)
    if to is LessonState.ACTIVE and lesson.state not in IN_FORCE:
        await _require_room(connection, policy, "lesson", in_place_of=in_place_of)
    changed = update(LessonRow).where(LessonRow.id == lesson.id)
    values = {"state": to, "why": why, "superseded_by": superseded_by, "changed_at": at or func.now()}
    await connection.execute(changed.values(values | {"since_version": _active(policy) if since is None else since}))
    if to is not LessonState.ACTIVE:
        await _expire_practice(connection, [lesson.id], f"its lesson is {to.value}")
        await refresh_work_flag(connection, policy)
    await _tell(connection, policy, lesson.id, to, why)


async def _tell(
    connection: AsyncConnection, policy: str, lesson: LessonId, state: LessonState, why: str, **detail: JsonValue
) -> None:
    """Record a lesson's new state with the version that answers, and have gateways read the lessons again."""
    active = await connection.scalar(select(PolicyRow.active).where(PolicyRow.id == policy))
    kind = f"lesson_{state.value}"
    await insert_event(connection, policy, kind, lesson=str(lesson), version=active, why=why, **detail)
    await notify_directory(connection, policy)


async def _expire_practice(connection: AsyncConnection, lessons: Sequence[LessonId], why: str) -> None:
    """Expire the practice samples that no step has and that one of these lessons teaches."""
    samples = await connection.scalars(_UNCLAIMED_PRACTICE, {"lessons": list(lessons)})
    reasons = {SampleId(sample): why for sample in samples}
    await end_samples(connection, reasons, SampleState.EXPIRED, TurnOutcome.EXPIRED)


def _active(policy: str) -> ScalarSelect[int]:
    return select(PolicyRow.active).where(PolicyRow.id == policy).scalar_subquery()


def _settings(stored: dict[str, Any] | None) -> Lessons:
    return Lessons() if stored is None else Lessons.model_validate(stored)


def _text_of(row: Any) -> str:
    with suppress(ContentUnreadable, EncryptionKeyMissing):
        return str(row.text)
    return ""


def _lesson(row: Any, said: str | None = None) -> Lesson:
    """
    Args:
        said: in place of the stored text, which need not be decrypted then.
    """
    return Lesson(
        id=LessonId(row.id),
        text=_text_of(row) if said is None else said,
        state=LessonState(row.state),
        why=row.why,
        source=LessonSource(row.source),
        created_at=row.created_at,
        changed_at=row.changed_at,
        turn_id=None if row.turn_id is None else TurnId(row.turn_id),
        said_in=None if row.shown_by is None else TurnId(row.shown_by),
        superseded_by=None if row.superseded_by is None else LessonId(row.superseded_by),
        since_version=row.since_version,
    )
