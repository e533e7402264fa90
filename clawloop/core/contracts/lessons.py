"""Records of lessons: sentences that a policy's prompts hold, each typed by a person or taken from a correction."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from clawloop.core.ids import LessonId, SessionId, TurnId


class LessonState(StrEnum):
    ACTIVE = "active"  # in the prompt, as far as it fits
    OFF = "off"  # a person turned it off
    SUPERSEDED = "superseded"  # another lesson took its place
    ERASED = "erased"  # forgotten, or erased with the turn that it came from; its text is gone


class LessonSource(StrEnum):
    TYPED = "typed"  # by a person
    HINT = "hint"  # a judge made it of the user's words
    MESSAGE = "message"  # the user's own next message or comment


@dataclass(frozen=True, slots=True)
class ShownLesson:
    """A lesson as a prompt holds it.

    Args:
        text: empty once the lesson is erased.
    """

    id: LessonId
    text: str


@dataclass(frozen=True, slots=True)
class Lesson:
    """A stored lesson.

    Args:
        text: one line; empty once it is erased.
        why: the reason of its state, for people.
        changed_at: when its state last changed.
        turn_id: the turn that was corrected; None if a person typed the lesson.
        session_id: that turn's.
        superseded_by: the lesson in its place; None unless that is its state.
        turns: how many turns were answered with it.
        practised: how many requests were answered again without it, to be learned from with it.
    """

    id: LessonId
    text: str
    state: LessonState
    why: str
    source: LessonSource
    created_at: datetime
    changed_at: datetime
    turn_id: TurnId | None = None
    session_id: SessionId | None = None
    superseded_by: LessonId | None = None
    turns: int = 0
    practised: int = 0

    @property
    def shown(self) -> ShownLesson:
        return ShownLesson(self.id, self.text)


@dataclass(frozen=True, slots=True)
class Correction:
    """What a user's correction of a reply says, as a lesson."""

    text: str
    source: LessonSource


@dataclass(frozen=True, slots=True)
class PolicyLessons:
    """The lessons of a policy whose recipe has lessons on.

    Args:
        active: oldest first, those that fit into a prompt.
        known: the texts of all that are not erased, so that a session keeps those that it began with.
    """

    active: tuple[LessonId, ...]
    known: dict[LessonId, str]
