"""A policy's lessons: the text of one, the states it may change to, and those that a prompt holds."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from clawloop.core.contracts.lessons import Correction, Lesson, LessonSource, LessonState
from clawloop.core.errors import StateConflict, ValueRejected
from clawloop.core.judging.evidence import has_control_tokens
from clawloop.core.judging.hints import HintChoice, comparable_words
from clawloop.core.recipes.lessons import Lessons
from clawloop.core.recipes.recipe import Recipe

LONGEST = 300
"""Characters of a lesson: a long sentence. What is longer is a document, which belongs into the client's own prompt."""
MOST_LESSONS = 100
"""Lessons of a policy that are in force."""
MOST_LISTED = 2 * MOST_LESSONS
"""Lessons of a policy that are read: those in force, and the newest of the others. Gateways do so once a second."""
MOST_SHOWN = 30
"""Lessons in one prompt: their ids fit into an answer's header, and a model obeys few notes better than many."""
# Prose has more bytes a token in most scripts: English about four, Chinese and Japanese about three. Only a tokenizer
# could tell, and gateways have none.
_BYTES_A_TOKEN = 3
_LINE_TOKENS = 3  # the dash before a lesson, and the line's end

# The states that a lesson may change to, and those that they follow. People set all but LEARNED.
_CHANGES = {
    LessonState.OFF: frozenset({LessonState.ACTIVE, LessonState.LEARNED}),
    LessonState.ACTIVE: frozenset({LessonState.OFF, LessonState.SUPERSEDED, LessonState.LEARNED}),
    LessonState.LEARNED: frozenset({LessonState.ACTIVE}),
    LessonState.SUPERSEDED: frozenset({LessonState.ACTIVE, LessonState.OFF, LessonState.LEARNED}),
    LessonState.ERASED: frozenset(set(LessonState) - {LessonState.ERASED}),
}


def read_lesson(written: str) -> str:
    """The text of a lesson on one line.

    Raises:
        ValueRejected: it is empty, too long, or holds characters that could end the system message.
    """
    text = " ".join(written.split())
    if not text:
        raise _rejected("is empty: write one sentence, such as `Answer in one or two short sentences.`")
    if len(text) > LONGEST:
        raise _rejected(
            f"has {len(text)} characters, and a lesson has at most {LONGEST}: write one sentence; longer instructions"
            " belong into the client's own system message"
        )
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise _rejected("holds control characters: write it without them")
    if has_control_tokens(text):
        raise _rejected("holds control tokens of chat templates, e.g. `<|im_end|>`: write it without them")
    return text


def digest_of(text: str) -> bytes:
    """SHA-256 of a lesson's words, so that a repeated one is found: the same in any case, width and punctuation."""
    words = comparable_words(text) or [text]
    return sha256(" ".join(words).encode()).digest()


def require_change(lesson: Lesson, to: LessonState) -> None:
    """
    Raises:
        StateConflict: a lesson in its state cannot change to this one.
    """
    if lesson.state not in _CHANGES[to]:
        raise StateConflict(
            f"Lesson {lesson.id} is {lesson.state.value} and cannot become {to.value}: {lesson.why}.",
            code="lesson_conflict",
            field="lesson",
        )


def tokens_of(text: str) -> int:
    """A lesson's tokens in a prompt, estimated from its bytes: in prose rather too many than too few."""
    return -(-len(text.encode()) // _BYTES_A_TOKEN) + _LINE_TOKENS


def fitting(lessons: Iterable[Lesson], max_tokens: int) -> list[Lesson]:
    """The active lessons that a new prompt holds, oldest first; if not all fit, the newest of those that do.

    Args:
        max_tokens: of all of them together.
    """
    chosen: list[Lesson] = []
    left = max_tokens
    for lesson in sorted(filter(_may_be_shown, lessons), key=lambda one: one.id, reverse=True):
        if (tokens := tokens_of(lesson.text)) <= left and len(chosen) < MOST_SHOWN:
            left -= tokens
            chosen.append(lesson)
    return chosen[::-1]


def _may_be_shown(lesson: Lesson) -> bool:
    """True of an active lesson that a prompt can hold."""
    return lesson.state is LessonState.ACTIVE and bool(lesson.text)


@dataclass(frozen=True, slots=True)
class LessonBook:
    """A policy's lessons, and how its recipe shows them.

    Args:
        lessons: those in force, and the newest of the others that are not erased; oldest first.
    """

    settings: Lessons
    lessons: tuple[Lesson, ...]

    @property
    def shown(self) -> list[Lesson]:
        """Those that a new session gets."""
        return fitting(self.lessons, self.settings.max_tokens) if self.settings.enabled else []

    @property
    def left_out(self) -> list[Lesson]:
        """Active lessons that a new session does not get, because they do not all fit; none while lessons are off."""
        shown = {lesson.id for lesson in self.shown}
        active = filter(_may_be_shown, self.lessons)
        return [lesson for lesson in active if lesson.id not in shown] if self.settings.enabled else []


def correction_of(recipe: Recipe, hint: HintChoice, *, commented: bool = False) -> Correction | None:
    """What a correction says as a lesson, if the recipe makes lessons of corrections: the shortest of the hints, which
    say the same in other words.

    Args:
        hint: made of the user's words alone, or these words.
        commented: they are a comment alone.
    """
    if not recipe.lessons.enabled or not recipe.lessons.from_corrections:
        return None
    source = LessonSource.HINT if recipe.signal.asks_for_hints else LessonSource.MESSAGE
    for text in sorted(hint.texts, key=len):  # a note is one sentence; a hint may be several
        with suppress(ValueRejected):
            return Correction(read_lesson(text), source, commented)
    return None


def _rejected(problem: str) -> ValueRejected:
    return ValueRejected(f"The lesson {problem}.", field="text")
