"""Records of lessons: sentences that a policy's prompts hold, each typed by a person or taken from a correction."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from clawloop.core.ids import LessonId, SessionId, TurnId


class LessonState(StrEnum):
    ACTIVE = "active"  # in the prompt, as far as it fits
    LEARNED = "learned"  # in the weights, and so in no new prompt
    OFF = "off"  # a person turned it off
    SUPERSEDED = "superseded"  # another lesson took its place
    ERASED = "erased"  # forgotten, or erased with the turn that it came from; its text is gone


IN_FORCE = frozenset({LessonState.ACTIVE, LessonState.LEARNED})
"""States of lessons that replies follow, by the prompt or by heart."""


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


class Finding(StrEnum):
    """What is known of a lesson's effect on replies."""

    NOT_MEASURED = "not_measured"  # there are too few replies to measure by
    NO_EFFECT = "no_effect"  # the interval of its effect is not above 0
    HAS_EFFECT = "has_effect"  # versions lack it without the lesson, or have not been measured
    NOT_LEARNED = "not_learned"  # three versions that practised it lack it still
    LEARNED = "learned"
    GROWN = "grown"  # it was learned, and the newest version lacks it again


class EffectLeft(NamedTuple):
    """The share of a lesson's effect that a version lacks without the lesson; below 0 if it does more than that."""

    version: int
    share: float


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a lesson did when it was new, and what later versions lack of that without it.

    Args:
        replies: by how many it is measured.
        version: in which it was new; None: not measured.
        effect, low, high: nats a reply by which the lesson made replies likelier, and the interval of 95 %.
        left: of the versions on the active one's path that were measured since, oldest first.
        learned_by: those of them that learned a lesson which is still in the prompt; empty: none, or it is not there.
    """

    replies: int
    finding: Finding
    version: int | None = None
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    left: tuple[EffectLeft, ...] = ()
    learned_by: tuple[EffectLeft, ...] = ()


class LearnedIn(NamedTuple):
    """The versions that hold what a lesson taught.

    Args:
        versions: those on the head's path that learned from samples which it taught, and what followed from them.
        before: the newest version before these that still has files; 0: the base model; None: no version has it.
    """

    versions: tuple[int, ...] = ()
    before: int | None = None


NOWHERE = LearnedIn()


@dataclass(frozen=True, slots=True)
class Lesson:
    """A stored lesson.

    Args:
        text: one line; empty once it is erased, or where it cannot be decrypted.
        why: the reason of its state, for people.
        changed_at: when its state last changed; when a correction changed it, the time at which this was said.
        turn_id: the turn that was corrected; None if a person typed the lesson.
        said_in: the turn whose request holds the correction; None: a comment does, or there is none.
        session_id: of both turns.
        superseded_by: the lesson in its place; None unless that is its state.
        turns: how many turns were answered with it.
        practised: how many requests were answered again without it, to be learned from with it.
        since_version: of a learned lesson, the first version that had learned it; else the version that answered when
            its state last changed, or, if a pin or a roll-back brought a learned lesson back, the one before it was
            learned.
        yardstick: None: it was not read.
        learned_in: what forgetting it leaves.
    """

    id: LessonId
    text: str
    state: LessonState
    why: str
    source: LessonSource
    created_at: datetime
    changed_at: datetime
    turn_id: TurnId | None = None
    said_in: TurnId | None = None
    session_id: SessionId | None = None
    superseded_by: LessonId | None = None
    turns: int = 0
    practised: int = 0
    since_version: int = 0
    yardstick: Yardstick | None = None
    learned_in: LearnedIn = NOWHERE

    @property
    def shown(self) -> ShownLesson:
        return ShownLesson(self.id, self.text)


@dataclass(frozen=True, slots=True)
class Correction:
    """What a user's correction of a reply says, as a lesson.

    Args:
        commented: a comment on the reply says it, and no message.
        repeats: the lesson that asks for the same in other words.
        replaces: the lesson that it contradicts, or says more exactly.
    """

    text: str
    source: LessonSource
    commented: bool = False
    repeats: LessonId | None = None
    replaces: LessonId | None = None


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What forgetting a lesson took away, and what still has it.

    Args:
        turns: turns of conversations whose prompts held it.
    """

    turns: int
    learned_in: LearnedIn = NOWHERE


@dataclass(frozen=True, slots=True)
class PolicyLessons:
    """The lessons of a policy whose recipe has lessons on.

    Args:
        active: oldest first, those that fit into a prompt.
        known: the texts of all that are listed, so that a session keeps those that it began with.
    """

    active: tuple[LessonId, ...]
    known: dict[LessonId, str]
