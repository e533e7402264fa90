"""The demo's world: requests, right answers in two styles, and programmatic grading.

There are three style axes; a request tests one of them, and both styles of an axis have the same content. Evaluation
and chat requests share no subject, so evaluation measures generalisation.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from clawloop.core.contracts.training import ProbeContent

_SUBJECTS = tomllib.loads((Path(__file__).parent / "words" / "subjects.toml").read_text(encoding="utf-8"))


class Axis(StrEnum):
    """A choice between two styles."""

    CODE = "code"
    LENGTH = "length"
    TONE = "tone"


class Style(StrEnum):
    """A style of answering."""

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
HINTS: dict[Style, tuple[str, ...]] = {Style(name): tuple(texts) for name, texts in _SUBJECTS["hints"].items()}
"""Hints for each style; the model as judge writes the first one."""
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
_HELD_OUT_EVERY = 3  # every third subject is for evaluation only
_EVALUATION_PER_AXIS = 20
_PROBES_PER_AXIS = 40


@dataclass(frozen=True, slots=True)
class Request:
    """A user's request.

    Args:
        axis: the style axis that the answer shows.
        subject: a function, topic or event of `words/subjects.toml`.
        person: the recipient of a note; None for other requests.
        text: as the user writes it.
    """

    axis: Axis
    subject: str
    person: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of an answer.

    Args:
        exact: the content is right as a whole, in either style.
        match: and the style is the one that the user prefers for the request's axis.
    """

    exact: bool
    match: bool


def other(style: Style) -> Style:
    """Return the other style of the same axis."""
    first, second = STYLES[AXIS_OF[style]]
    return second if style is first else first


def answer(request: Request, style: Style) -> str:
    """Return the right answer in a style of the request's axis.

    Raises:
        ValueError: the style belongs to another axis.
    """
    if AXIS_OF[style] is not request.axis:
        raise ValueError(f"a request that shows {request.axis} cannot be answered in style {style}")
    if request.axis is Axis.CODE:
        python, javascript = _SUBJECTS["functions"][request.subject]
        return f"```{style.value}\n{python if style is Style.PYTHON else javascript}\n```"
    if request.axis is Axis.LENGTH:
        fact, detail, more = _SUBJECTS["topics"][request.subject]
        if style is Style.CONCISE:
            return f"In short, {fact}."
        return f"Let me explain in detail. First, {fact}. {detail}. {more}."
    if style is Style.FORMAL:
        return f"Dear {request.person},\nI am writing to inform you about {request.subject}.\nKind regards"
    return f"Hey {request.person}!\nJust a quick word about {request.subject}.\nCheers"


def style_of(text: str) -> Style | None:
    """Return the style of a text by its opening; None if no style has this opening."""
    return next((style for opening, style in _OPENINGS.items() if text.startswith(opening)), None)


def grade(request: Request, text: str, preference: Preference) -> Grade:
    """Grade an answer, ignoring surrounding white space."""
    style = style_of(text.strip())
    exact = style is not None and AXIS_OF[style] is request.axis and text.strip() == answer(request, style)
    return Grade(exact=exact, match=exact and style is preference[request.axis])


def draw_preference(seed: int) -> dict[Axis, Style]:
    """Draw a preferred style for every axis from the seed."""
    rng = random.Random(f"preference {seed}")
    return {axis: rng.choice(styles) for axis, styles in STYLES.items()}


def flipped(preference: Preference, axes: Collection[Axis]) -> dict[Axis, Style]:
    """Return the preference with the other style on the given axes."""
    return {axis: other(style) if axis in axes else style for axis, style in preference.items()}


def _requests(axis: Axis, *, evaluation: bool) -> list[Request]:
    def select(subjects: Sequence[str]) -> list[str]:
        return [subject for at, subject in enumerate(subjects) if (at % _HELD_OUT_EVERY == 0) is evaluation]

    if axis is Axis.CODE:
        tasks = select(list(_SUBJECTS["functions"]))
        return [Request(axis, task, None, ask.format(task)) for task in tasks for ask in _SUBJECTS["function_asks"]]
    if axis is Axis.LENGTH:
        topics = select(list(_SUBJECTS["topics"]))
        return [Request(axis, topic, None, ask.format(topic)) for topic in topics for ask in _SUBJECTS["topic_asks"]]
    return [
        Request(axis, event, person, ask.format(person, event))
        for event in select(_SUBJECTS["events"])
        for person in _SUBJECTS["people"]
        for ask in _SUBJECTS["note_asks"]
    ]


def _evaluation() -> tuple[Request, ...]:
    rng = random.Random("evaluation requests")
    chosen = [rng.sample(_requests(axis, evaluation=True), _EVALUATION_PER_AXIS) for axis in Axis]
    return tuple(request for together in zip(*chosen, strict=True) for request in together)


CHAT: dict[Axis, tuple[Request, ...]] = {axis: tuple(_requests(axis, evaluation=False)) for axis in Axis}
"""Requests for chats, by axis."""
EVALUATION: tuple[Request, ...] = _evaluation()
"""60 fixed requests that occur neither in chats nor in pretraining, the axes in turn."""


def _probe_requests() -> tuple[Request, ...]:
    rng = random.Random("probe requests")
    others = {axis: [r for r in _requests(axis, evaluation=True) if r not in EVALUATION] for axis in Axis}
    return tuple(request for axis in Axis for request in rng.sample(others[axis], _PROBES_PER_AXIS))


PROBES: tuple[Request, ...] = _probe_requests()
"""120 requests that the gate asks: no user types them, and they are none of the evaluation's."""


def every_request(axis: Axis) -> tuple[Request, ...]:
    """Return all requests of an axis, for chats and for evaluation."""
    return (*CHAT[axis], *_requests(axis, evaluation=True))


def taught_requests(axis: Axis) -> tuple[Request, ...]:
    """Return the requests of an axis that pretraining uses: all but the 60 of the evaluation.

    The evaluation's subjects are taught in other wordings, or the model could not know the right answers.
    """
    return tuple(request for request in every_request(axis) if request not in EVALUATION)


def demo_probes() -> list[ProbeContent]:
    """Return the probes of the demo's gate, which the demo adds as `clawloop probe add` does.

    They take the right content in either style: which style a user wants is no business of the gate.
    """
    return [
        ProbeContent(messages=[{"role": "user", "content": request.text}], regex=_either_style(request))
        for request in PROBES
    ]


def _either_style(request: Request) -> str:
    answers = "|".join(_literal(answer(request, style)) for style in STYLES[request.axis])
    return rf"\A\s*(?:{answers})\s*\z"


def _literal(text: str) -> str:
    """Escape a text for Rust's regex crate, which refuses some of what `re.escape` writes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)
