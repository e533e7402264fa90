"""Lessons in memory, over the turns of a fake turn store."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from clawloop.core.contracts.lessons import Forgotten, Lesson, LessonSource, LessonState
from clawloop.core.errors import NotFound, StateConflict
from clawloop.core.ids import LessonId, new_lesson_id
from clawloop.core.lessons.ledger import MOST_LESSONS, LessonBook, digest_of, read_lesson, require_change
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
        kept = [replace(one, turns=self._turns.turns_with(one.id)) for one in self._lessons.values()]
        return LessonBook(self.settings, tuple(one for one in kept if one.state is not LessonState.ERASED))

    async def add(self, policy: str, written: str, instead_of: LessonId | None = None) -> Lesson:
        said = read_lesson(written)
        before = None if instead_of is None else self._read(policy, instead_of)
        if before is not None:
            require_change(before, LessonState.SUPERSEDED)
        kept = (await self.book(policy)).lessons
        same = next((one for one in kept if digest_of(one.text) == digest_of(said)), None)
        if same is not None and before is not None and same.id == before.id:
            return same
        if same is None:
            if len(kept) >= MOST_LESSONS:
                raise StateConflict("Too many.", code="too_many_lessons", field="text")
            now = datetime.now(UTC)
            same = Lesson(new_lesson_id(), said, LessonState.ACTIVE, "typed", LessonSource.TYPED, now, now)
            self._lessons[same.id] = same
        elif same.state is not LessonState.ACTIVE:
            await self.change(policy, same.id, LessonState.ACTIVE, "typed again")
        if before is not None:
            await self.change(policy, before.id, LessonState.SUPERSEDED, "replaced by another lesson")
            self._lessons[before.id] = replace(self._lessons[before.id], superseded_by=same.id)
        return self._read(policy, same.id)

    async def change(self, policy: str, lesson: LessonId, to: LessonState, why: str) -> Lesson:
        stored = self._read(policy, lesson)
        if stored.state is not to:
            require_change(stored, to)
            self._lessons[lesson] = replace(stored, state=to, why=why, changed_at=datetime.now(UTC), superseded_by=None)
        return self._read(policy, lesson)

    async def forget(self, policy: str, lesson: LessonId) -> Forgotten:
        require_change(self._read(policy, lesson), LessonState.ERASED)
        await self.change(policy, lesson, LessonState.ERASED, "forgotten")
        self._lessons[lesson] = replace(self._lessons[lesson], text="")
        return Forgotten(self._turns.erase_lesson(lesson))

    def _read(self, policy: str, lesson: LessonId) -> Lesson:
        _require(policy)
        if (stored := self._lessons.get(lesson)) is None:
            raise NotFound("There is none.", code="lesson_not_found", field="lesson")
        return replace(stored, turns=self._turns.turns_with(lesson))


def _require(policy: str) -> None:
    if policy != "default":
        raise NotFound(f"There is no policy {policy!r}.", code="policy_not_found", field="policy")
