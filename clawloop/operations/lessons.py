"""Operators' changes to lessons: listed, typed, turned off and on, replaced, forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from clawloop.core.contracts.answers import LessonForgotten, LessonList, LessonView, YardstickView
from clawloop.core.contracts.lessons import IN_FORCE, Forgotten, Lesson, LessonState, Yardstick
from clawloop.core.errors import AmbiguousId, NotFound
from clawloop.core.ids import LessonId, ids_beginning, short_form
from clawloop.core.lessons.ledger import MOST_LESSONS, MOST_SHOWN, LessonBook
from clawloop.core.lessons.yardstick import in_words

NOT_SHOWN = (
    "Lessons are off, so that no prompt holds it yet: set enabled = true under [lessons] of the recipe"
    " (`clawloop recipe set`)."
)

NOT_TRAINED = (
    "Chats with a lesson in their prompt are judged and not trained. Have lessons learned (lessons.practice and"
    " lessons.retire of the recipe), turn off those that are not, or send `X-Clawloop-Lessons: off` with requests that"
    " are to be trained."
)

UNREADABLE = "(cannot be decrypted, so that no prompt holds it)"


def warnings(listed: LessonList) -> list[str]:
    """What a person should know of the list as a whole, and can do about it."""
    if not listed.enabled:
        return [NOT_SHOWN] if listed.lessons else []
    found = []
    if listed.left_out:
        are = "lesson does" if listed.left_out == 1 else "lessons do"
        found.append(
            f"{listed.left_out} active {are} not fit into a prompt beside newer ones: turn off or forget what is old,"
            f" or raise lessons.max_tokens of the recipe ({listed.max_tokens} tokens; {MOST_SHOWN} lessons at most)."
        )
    if any(lesson.in_prompt for lesson in listed.lessons):
        found.append(NOT_TRAINED)
    if sum(lesson.state in IN_FORCE for lesson in listed.lessons) >= MOST_LESSONS:
        found.append(
            f"There are {MOST_LESSONS} active and learned lessons, as many as there can be: corrections make none."
            " Turn some off, or forget them."
        )
    return found


class LessonStore(Protocol):
    """Every call raises StoreUnavailable when PostgreSQL does not answer in time, NotFound without such a policy or
    lesson."""

    async def book(self, policy: str) -> LessonBook:
        """The policy's lessons, without those that were erased; of those that are not in force the newest."""

    async def ids(self, policy: str) -> list[LessonId]:
        """The ids of all lessons that were not erased, oldest first."""

    async def add(self, policy: str, written: str, instead_of: LessonId | None = None) -> Lesson:
        """An active lesson with these words: the one that is there, or a new one.

        Args:
            instead_of: the lesson that it supersedes.

        Raises:
            ValueRejected: this is no lesson.
            StateConflict: the policy can have no more in force, or `instead_of` cannot be superseded.
        """

    async def change(self, policy: str, lesson: LessonId, to: LessonState, why: str) -> Lesson:
        """The lesson in another state; as it is if it has that state.

        Raises:
            StateConflict: it cannot have this state, or the policy no more in force.
        """

    async def forget(self, policy: str, lesson: LessonId) -> Forgotten:
        """Erase the lesson's text from the ledger and from the prompts of turns.

        Raises:
            StateConflict: it was erased before.
        """


class LessonOperations:
    def __init__(self, store: LessonStore) -> None:
        self._store = store

    async def list(self, policy: str) -> LessonList:
        """The lessons that are not erased, oldest first; of those that are not in force the newest."""
        return _listed(policy, await self._store.book(policy))

    async def add(self, policy: str, written: str, instead_of: str | None = None) -> LessonView:
        """Add a lesson, or turn the one with the same words on.

        Args:
            instead_of: id of the lesson that it replaces, or its beginning.

        Raises:
            ValueRejected, StateConflict, NotFound, AmbiguousId
        """
        replaced = None if instead_of is None else await self._find(policy, instead_of)
        return await self._view(policy, await self._store.add(policy, written, replaced))

    async def turn_off(self, policy: str, reference: str) -> LessonView:
        """Leave a lesson out of prompts; a session that began with it keeps it.

        Raises:
            StateConflict, NotFound, AmbiguousId
        """
        return await self._change(policy, reference, LessonState.OFF, "turned off")

    async def turn_on(self, policy: str, reference: str) -> LessonView:
        """Have prompts hold a lesson again.

        Raises:
            StateConflict, NotFound, AmbiguousId
        """
        return await self._change(policy, reference, LessonState.ACTIVE, "turned on")

    async def forget(self, policy: str, reference: str) -> LessonForgotten:
        """Erase a lesson's text for good, also from the prompts of recorded turns.

        Raises:
            StateConflict, NotFound, AmbiguousId
        """
        lesson = await self._find(policy, reference)
        forgotten = await self._store.forget(policy, lesson)
        versions, before = forgotten.learned_in
        return LessonForgotten(id=lesson, turns=forgotten.turns, versions=versions, roll_back_to=before)

    async def _change(self, policy: str, reference: str, to: LessonState, why: str) -> LessonView:
        return await self._view(policy, await self._store.change(policy, await self._find(policy, reference), to, why))

    async def _find(self, policy: str, reference: str) -> LessonId:
        span = ids_beginning(reference)
        found = [one for one in await self._store.ids(policy) if span is not None and span[0] <= one <= span[1]]
        if not found:
            raise NotFound(
                f"policy {policy!r} has no lesson {reference}; `clawloop lesson list` shows them",
                code="lesson_not_found",
                field="lesson",
            )
        if len(found) > 1:
            raise AmbiguousId(f"{reference!r} begins the id of several lessons; give more of it", field="lesson")
        return found[0]

    async def _view(self, policy: str, lesson: Lesson) -> LessonView:
        book = await self._store.book(policy)
        if all(one.id != lesson.id for one in book.lessons):  # it is older than those that are listed
            book = replace(book, lessons=(lesson, *book.lessons))
        return next(view for view in _listed(policy, book).lessons if view.id == lesson.id)


def _listed(policy: str, book: LessonBook) -> LessonList:
    shown = {lesson.id for lesson in book.shown}
    ids = [lesson.id for lesson in book.lessons]
    return LessonList(
        policy=policy,
        enabled=book.settings.enabled,
        max_tokens=book.settings.max_tokens,
        left_out=len(book.left_out),
        lessons=[
            LessonView(
                id=lesson.id,
                short_id=short_form(lesson.id, *(other for other in ids if other != lesson.id)),
                text=lesson.text or UNREADABLE,
                state=lesson.state,
                why=lesson.why,
                in_prompt=lesson.id in shown,
                source=lesson.source,
                turns=lesson.turns,
                practised=lesson.practised,
                since_version=lesson.since_version,
                yardstick=None if lesson.yardstick is None else _measured(lesson.yardstick),
                versions=lesson.learned_in.versions,
                roll_back_to=lesson.learned_in.before,
                turn_id=lesson.turn_id,
                said_in=lesson.said_in,
                session_id=lesson.session_id,
                superseded_by=lesson.superseded_by,
                created_at=lesson.created_at,
                changed_at=lesson.changed_at,
            )
            for lesson in book.lessons
        ],
    )


def _measured(found: Yardstick) -> YardstickView:
    return YardstickView(
        finding=found.finding,
        replies=found.replies,
        version=found.version,
        effect=found.effect,
        low=found.low,
        high=found.high,
        left=dict(found.left),
        summary=in_words(found),
    )
