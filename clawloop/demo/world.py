"""The demo's small world: requests, the two styles each can be answered in, and grades given by a program.

Knows nothing about models, users or judging. Three style axes; a request shows one of them, and both styles of
an axis hold the same content, so a model may answer either way until it learns what its user likes. Requests
for evaluation and for chats share no subject: what was learned about one must carry over to the other.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from clawloop.demo.contents import EVENTS, FUNCTION_ASKS, FUNCTIONS, NOTE_ASKS, PEOPLE, TOPIC_ASKS, TOPICS


class Axis(StrEnum):
    """What a user may prefer one way or the other."""

    CODE = "code"
    LENGTH = "length"
    TONE = "tone"


class Style(StrEnum):
    """One way of answering."""

    PYTHON = "python"
    JAVASCRIPT = "javascript"
    CONCISE = "concise"
    DETAILED = "detailed"
    FORMAL = "formal"
    FRIENDLY = "friendly"


STYLES: dict[Axis, tuple[Style, Style]] = {
    Axis.CODE: (Style.PYTHON, Style.JAVASCRIPT),
    Axis.LENGTH: (Style.CONCISE, Style.DETAILED),
    Axis.TONE: (Style.FORMAL, Style.FRIENDLY),
}
AXIS_OF = {style: axis for axis, styles in STYLES.items() for style in styles}
Preference: TypeAlias = Mapping[Axis, Style]

_OPENINGS = {
    "```python\n": Style.PYTHON,
    "```javascript\n": Style.JAVASCRIPT,
    "In short, ": Style.CONCISE,
    "Let me explain ": Style.DETAILED,
    "Dear ": Style.FORMAL,
    "Hey ": Style.FRIENDLY,
}
_HELD_OUT_EVERY = 3  # each third subject is for evaluation only
_EVALUATION_PER_AXIS = 20


@dataclass(frozen=True, slots=True)
class Request:
    """Something a user asks for.

    Args:
        axis: the style axis its answer shows.
        subject: what it is about, a key of `contents`.
        person: whom a note is for; None if it is no note.
        text: as the user writes it.
    """

    axis: Axis
    subject: str
    person: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Grade:
    """What a program says about an answer.

    Args:
        exact: the content is right, whichever style it is in.
        match: it is in the preferred style of every axis the request shows.
    """

    exact: bool
    match: bool


def other(style: Style) -> Style:
    """The other style of the same axis."""
    first, second = STYLES[AXIS_OF[style]]
    return second if style is first else first


def answer(request: Request, style: Style) -> str:
    """The right answer in a style of the request's axis.

    Raises:
        ValueError: the style belongs to another axis.
    """
    if AXIS_OF[style] is not request.axis:
        raise ValueError(f"a request that shows {request.axis} cannot be answered in style {style}")
    if request.axis is Axis.CODE:
        python, javascript = FUNCTIONS[request.subject]
        return f"```{style.value}\n{python if style is Style.PYTHON else javascript}\n```"
    if request.axis is Axis.LENGTH:
        fact, detail, more = TOPICS[request.subject]
        if style is Style.CONCISE:
            return f"In short, {fact}."
        return f"Let me explain in detail. First, {fact}. {detail}. {more}."
    if style is Style.FORMAL:
        return f"Dear {request.person},\nI am writing to inform you about {request.subject}.\nKind regards"
    return f"Hey {request.person}!\nJust a quick word about {request.subject}.\nCheers"


def style_of(text: str) -> Style | None:
    """The style a text is written in, by how it begins; None if it is in none."""
    return next((style for opening, style in _OPENINGS.items() if text.startswith(opening)), None)


def grade(request: Request, text: str, preference: Preference) -> Grade:
    """Grade an answer; white space around it does not count."""
    style = style_of(text.strip())
    exact = style is not None and AXIS_OF[style] is request.axis and text.strip() == answer(request, style)
    return Grade(exact=exact, match=style is preference[request.axis])


def draw_preference(seed: int) -> dict[Axis, Style]:
    """A hidden preference for every axis, drawn from the seed."""
    chance = random.Random(f"preference {seed}")
    return {axis: chance.choice(styles) for axis, styles in STYLES.items()}


def flipped(preference: Preference, axes: Collection[Axis]) -> dict[Axis, Style]:
    """The same preference, but the other style on these axes."""
    return {axis: other(style) if axis in axes else style for axis, style in preference.items()}


def _phrased(axis: Axis, *, evaluation: bool) -> list[Request]:
    def keep(subjects: Sequence[str]) -> list[str]:
        return [subject for at, subject in enumerate(subjects) if (at % _HELD_OUT_EVERY == 0) is evaluation]

    if axis is Axis.CODE:
        tasks = keep(list(FUNCTIONS))
        return [Request(axis, task, None, ask.format(task)) for task in tasks for ask in FUNCTION_ASKS]
    if axis is Axis.LENGTH:
        topics = keep(list(TOPICS))
        return [Request(axis, topic, None, ask.format(topic)) for topic in topics for ask in TOPIC_ASKS]
    return [
        Request(axis, event, person, ask.format(person, event))
        for event in keep(EVENTS)
        for person in PEOPLE
        for ask in NOTE_ASKS
    ]


def _evaluation() -> tuple[Request, ...]:
    chance = random.Random("evaluation requests")
    chosen = [chance.sample(_phrased(axis, evaluation=True), _EVALUATION_PER_AXIS) for axis in Axis]
    return tuple(request for together in zip(*chosen, strict=True) for request in together)


CHAT: dict[Axis, tuple[Request, ...]] = {axis: tuple(_phrased(axis, evaluation=False)) for axis in Axis}
"""What a user asks in chats, by axis."""
EVALUATION: tuple[Request, ...] = _evaluation()
"""60 fixed requests that no chat contains, 20 of each axis in turn."""


def every_request(axis: Axis) -> tuple[Request, ...]:
    """All requests that show this axis, for chats and for evaluation: what the model was made to know."""
    return (*CHAT[axis], *_phrased(axis, evaluation=True))
