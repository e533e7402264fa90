"""Lessons in memory, over the turns of a fake turn store."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from clawloop.core.contracts.lessons import IN_FORCE, Forgotten, Lesson, LessonSource, LessonState
from clawloop.core.errors import NotFound, StateConflict
from clawloop.core.ids import LessonId, new_lesson_id
from clawloop.core.lessons.ledger import MOST_LESSONS, MOST_LISTED, LessonBook, digest_of, read_lesson, require_change
from clawloop.core.recipes.lessons import Lessons
from tests.fakes.turn_store import FakeTurnStore


class FakeLessonStore:
    """Satisfies `clawloop.operations.lessons.LessonStore`, for the policy `default`.

    Attributes:
        settings: of the policy's recipe.
    """

    def __init__(self, turns: FakeTurnStore, settings: Lessons | None = None) -> None:
        self.settings = settings or Lessons()
        self._turns = turns
        self._lessons: dict[LessonId, Lesson] = {}

    async def book(self, policy: str) -> LessonBook:
        _require(policy)
        listed = sorted(self._kept(), key=lambda one: (one.state in IN_FORCE, one.changed_at, one.id))
        lessons = [replace(one, turns=self._turns.turns_with(one.id)) for one in listed[-MOST_LISTED:]]
        return LessonBook(self.settings, tuple(sorted(lessons, key=lambda one: one.id)))

    async def ids(self, policy: str) -> list[LessonId]:
        _require(policy)
        return sorted(one.id for one in self._kept())

    async def add(self, policy: str, written: str, instead_of: LessonId | None = None) -> Lesson:
        said = read_lesson(written)
        _require(policy)
        before = None if instead_of is None else self._read(policy, instead_of)
        if before is not None:
            require_change(before, LessonState.SUPERSEDED)
        same = next((one for one in self._kept() if digest_of(one.text) == digest_of(said)), None)
        if same is not None and before is not None and same.id == before.id:
            return self._read(policy, same.id)
        if same is None:
            self._require_room("text", before)
            now = datetime.now(UTC)
            same = Lesson(new_lesson_id(), said, LessonState.ACTIVE, "typed", LessonSource.TYPED, now, now)
            self._lessons[same.id] = same
        else:
            self._change(same, LessonState.ACTIVE, "typed again", in_place_of=before)
        if before is not None:
            self._change(before, LessonState.SUPERSEDED, "replaced by another lesson")
            self._lessons[before.id] = replace(self._lessons[before.id], superseded_by=same.id)
        return self._read(policy, same.id)

    async def change(self, policy: str, lesson: LessonId, to: LessonState, why: str) -> Lesson:
        self._change(self._read(policy, lesson), to, why)
        return self._read(policy, lesson)

    async def forget(self, policy: str, lesson: LessonId) -> Forgotten:
        stored = self._read(policy, lesson)
        require_change(stored, LessonState.ERASED)
        self._change(stored, LessonState.ERASED, "forgotten")
        self._lessons[lesson] = replace(self._lessons[lesson], text="")
        return Forgotten(self._turns.erase_lesson(lesson))

    def _kept(self) -> list[Lesson]:
        return [one for one in self._lessons.values() if one.state is not LessonState.ERASED]

    def _change(self, lesson: Lesson, to: LessonState, why: str, *, in_place_of: Lesson | None = None) -> None:
        if lesson.state is to:
            return
        require_change(lesson, to)
        if to is LessonState.ACTIVE and lesson.state not in IN_FORCE:
            self._require_room("lesson", in_place_of)
        changed = replace(lesson, state=to, why=why, changed_at=datetime.now(UTC), superseded_by=None)
        self._lessons[lesson.id] = changed

    def _require_room(self, field: str, in_place_of: Lesson | None) -> None:
        in_force = [one for one in self._kept() if one.state in IN_FORCE]
        if len([one for one in in_force if in_place_of is None or one.id != in_place_of.id]) >= MOST_LESSONS:
            raise StateConflict("Too many.", code="too_many_lessons", field=field)

    def _read(self, policy: str, lesson: LessonId) -> Lesson:
        _require(policy)
        if (stored := self._lessons.get(lesson)) is None:
            raise NotFound("There is none.", code="lesson_not_found", field="lesson")
        return replace(stored, turns=self._turns.turns_with(lesson))


def _require(policy: str) -> None:
    if policy != "default":
        raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy")
