"""Practice: the newest requests, answered again without lessons, for the policy that reads the lessons to teach; and,
while a lesson is new, some answered with it, which no step trains: it is measured by these.

What is trained is what the policy samples by itself, so that lessons go into the weights without a judge and a user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clawloop.core.contracts.lessons import ShownLesson
from clawloop.core.contracts.turns import TurnRecord
from clawloop.core.families.orders import SENT_BY
from clawloop.core.ids import LessonId
from clawloop.core.judging.hints import CONTROL_HINT, PromptChange
from clawloop.core.lessons.prompt import DEFAULT_SYSTEM
from clawloop.core.recipes.recipe import CONTROL, Recipe

NEWEST = 200
"""Main requests of a policy among which the next one to practise is: what it was asked for long ago says little about
what it is asked for now."""
MOST_TOKENS = 1024
"""Of a reply. A longer one is cut, and trained as cut: nobody reads its end, and the engine is wanted for chats."""

# Settings that are recorded beside those that an engine was sent, and the number of replies.
_NOT_SENT = frozenset({DEFAULT_SYSTEM, SENT_BY, "asked", "instructions_length", "tool_origins", "n"})
_LIMITS = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class Practice:
    """A request that is to be answered again without lessons, or with them.

    Args:
        source: the turn whose request it is.
        lessons: the policy's active ones, as a prompt would hold them now; without new ones that are yet to be
            measured, unless the reply is to measure one.
        version: that answers.
        recipe: under which the sample is made.
        measured: the lesson among them that the reply is to measure: it is answered with the lessons, and not trained.
    """

    source: TurnRecord
    lessons: tuple[ShownLesson, ...]
    version: int
    recipe: Recipe
    measured: LessonId | None = None

    @property
    def shown(self) -> tuple[ShownLesson, ...]:
        """The lessons that the prompt holds."""
        return () if self.measured is None else self.lessons


@dataclass(frozen=True, slots=True)
class PractisedReply:
    """
    Args:
        record: the reply as a turn of its own; its prompt held the lessons that are measured, or none.
        default_system: what the template says without a system message, and would not say with lessons.
    """

    record: TurnRecord
    default_system: str


@dataclass(frozen=True, slots=True)
class PracticeResult:
    """What became of a practised request.

    Args:
        record: None: nothing can be learned from it.
        prompts: by their places, the prompt with the lessons and the control; of a reply that measures a lesson the
            prompt without it; empty without a record.
        why: for people.
    """

    record: TurnRecord | None
    prompts: Mapping[int, PromptChange]
    why: str


def request_again(source: TurnRecord) -> dict[str, Any]:
    """The turn's chat request with its messages as they came, without lessons and without the model's name."""
    settings = {name: value for name, value in source.sampling.items() if name not in _NOT_SENT}
    known = {name: value for name in _LIMITS if isinstance(value := settings.get(name), int)}
    bounded = {name: min(value, MOST_TOKENS) for name, value in known.items()} or {_LIMITS[0]: MOST_TOKENS}
    tools = {} if source.tools is None else {"tools": source.tools}
    return {"messages": source.messages, **tools, **settings, **bounded}


def taught_by(reply: PractisedReply, lessons: tuple[ShownLesson, ...]) -> TurnRecord:
    """The practised turn as it would be if its prompt had held these lessons; what renders it gives the teacher's
    prompt."""
    own = {DEFAULT_SYSTEM: reply.default_system} if reply.default_system else {}
    return replace(reply.record, lessons=lessons, sampling={**reply.record.sampling, **own})


def control_of(reply: PractisedReply, lessons: tuple[ShownLesson, ...]) -> TurnRecord:
    """Likewise with a sentence that says nothing in place of the lessons."""
    return taught_by(reply, (ShownLesson(lessons[0].id, CONTROL_HINT),))


def without_lesson(record: TurnRecord, lesson: LessonId) -> TurnRecord:
    """The turn as it would be if its prompt had held all its lessons but this one."""
    return replace(record, lessons=tuple(one for one in record.lessons if one.id != lesson))


def places_of(taught: PromptChange, control: PromptChange | None) -> dict[int, PromptChange]:
    """The prompts of a practice sample by their places, as those of a hint and its control."""
    return {0: taught} if control is None else {0: taught, CONTROL: control}
