"""Labelled phrases: what a user or a tool said after a reply, and the vote that is right.

Examples for a small judge, and the lists that a judge is calibrated and measured on.
"""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from clawloop.core.contracts.turns import Message
from clawloop.core.errors import SetupError
from clawloop.core.judging.evidence import Evidence, gather

Kind: TypeAlias = Literal[
    "thanks", "builds", "worked", "corrects", "complains", "again", "failed", "new", "tells_nothing"
]
KINDS: Mapping[Kind, Literal[-1, 0, 1]] = {
    "thanks": 1,
    "builds": 1,
    "worked": 1,  # a tool
    "corrects": -1,
    "complains": -1,
    "again": -1,
    "failed": -1,  # a tool
    "new": 0,
    "tells_nothing": 0,
}
"""The right vote on each kind of phrase."""


class PhraseList(StrEnum):
    """Our lists, which share no wording."""

    EXAMPLES = "examples"  # shown to a small judge before its question
    CALIBRATION = "calibration"  # biases of the three answers are fitted on it
    TRIAL = "trial"  # a judge's form is chosen by it
    REPORTED = "reported"  # the figure that is shown; nothing is chosen by it


@dataclass(frozen=True, slots=True)
class Phrase:
    """A turn with what came next, and the right vote on it."""

    kind: Kind
    vote: Literal[-1, 0, 1]
    language: str
    evidence: Evidence


class _Talk(BaseModel):
    """One reply and what may come next, by kind.

    Args:
        calls: a call of a tool in place of the reply: its name and arguments.
    """

    model_config = ConfigDict(extra="forbid")

    domain: str = ""
    language: str = "en"
    task: str = Field(min_length=1)
    reply: str = ""
    calls: str = ""
    thanks: list[str] = []
    builds: list[str] = []
    worked: list[str] = []
    corrects: list[str] = []
    complains: list[str] = []
    again: list[str] = []
    failed: list[str] = []
    new: list[str] = []
    tells_nothing: list[str] = []

    def phrases(self) -> list[Phrase]:
        name, _, arguments = self.calls.partition(" ")
        response: Message = {"role": "assistant", "content": self.reply}
        if self.calls:
            response["tool_calls"] = [{"id": "1", "function": {"name": name, "arguments": arguments}}]
        found = []
        for kind, vote in KINDS.items():
            role = "tool" if kind in ("worked", "failed") else "user"
            for text in getattr(self, kind):
                evidence = gather([{"role": "user", "content": self.task}], response, [{"role": role, "content": text}])
                found.append(Phrase(kind, vote, self.language, evidence))
        return found


class _Talks(BaseModel):
    model_config = ConfigDict(extra="forbid")

    talk: list[_Talk] = Field(min_length=1)


def parse_phrases(text: str, name: str) -> list[Phrase]:
    """The phrases of a TOML text: tables `[[talk]]` with `task`, `reply` or `calls`, and lists of phrases by kind.

    Args:
        name: of the file, for errors.

    Raises:
        SetupError: the text is none of that; names the place.
    """
    try:
        talks = _Talks.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SetupError(f"{name} is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise SetupError(f"{name}: {place}: {first['msg']}") from None
    return [phrase for talk in talks.talk for phrase in talk.phrases()]


@cache
def phrases_of(phrase_list: PhraseList) -> tuple[Phrase, ...]:
    """One of our lists."""
    file = importlib.resources.files("clawloop.core.judging") / "phrases" / f"{phrase_list}.toml"
    return tuple(parse_phrases(file.read_text(encoding="utf-8"), f"{phrase_list}.toml"))
