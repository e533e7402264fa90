"""The file of an evaluation: its settings, then a JSON line for each session, written at once. A rerun goes on from it.

A line that a kill cut off at the end is dropped, and its session held again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from clawloop.core.errors import SetupError


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunLine(_Line):
    """The first line.

    Args:
        run: names the policies that the evaluation made.
        settings: what all its sessions depend on.
    """

    kind: Literal["run"] = "run"
    run: str
    settings: Mapping[str, JsonValue]


class SessionLine(_Line):
    """One session.

    Args:
        session: its number among those of this arm, seed and user, from 1.
        met: whether each reply meets the user's rule; the first is what counts.
        said: the user's messages; the first asks, each further one reacts to a reply.
        version: that answered first; None where nothing is learned.
        note: why nothing was being learned before it; empty: it was.
        prompt_tokens: of the request of each reply, as the gateway counts them; empty: it does not say.
        lessons: in the policy's prompts before it; None where none are made.
    """

    kind: Literal["session"] = "session"
    arm: str
    seed: int
    user: str
    session: int
    met: Sequence[bool]
    said: Sequence[str]
    replies: Sequence[str]
    version: int | None = None
    note: str = ""
    prompt_tokens: Sequence[int] = ()
    lessons: int | None = None

    @property
    def corrections(self) -> list[str]:
        """The user's words about replies that missed the rule."""
        return [said for said, met in zip(self.said[1:], self.met, strict=False) if not met]


class KnownLine(_Line):
    """The facts that version 0 knows: their numbers in the list of general questions."""

    kind: Literal["known"] = "known"
    questions: Sequence[int]


class FactsLine(_Line):
    """The facts asked again at the end of a policy's sessions.

    Args:
        user: of the policy; None: it serves all.
        right: of `asked`, those answered rightly.
    """

    kind: Literal["facts"] = "facts"
    arm: str
    seed: int
    user: str | None
    asked: int
    right: int


Line: TypeAlias = SessionLine | KnownLine | FactsLine
_LINE: TypeAdapter[RunLine | Line] = TypeAdapter(
    Annotated[RunLine | SessionLine | KnownLine | FactsLine, Field(discriminator="kind")]
)


class LineFile:
    """The lines of one evaluation, begun or gone on with.

    Attributes:
        run: its name.

    Raises:
        SetupError: the file belongs to other settings, is damaged before its end, or cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, JsonValue]) -> None:
        self._path = path
        self.sessions: dict[tuple[str, int, str], list[SessionLine]] = {}
        self.known: Sequence[int] | None = None
        self.facts: dict[tuple[str, int, str | None], FactsLine] = {}
        try:
            # `a+` makes the file where there is none.
            with path.open("a+b") as file:
                file.seek(0)
                content = file.read()
                whole = content[: content.rfind(b"\n") + 1]
                file.truncate(len(whole))
        except OSError as error:
            raise SetupError(f"{path} cannot be written: {error.strerror}; choose another file: --out") from error
        lines = [self._parse(line, number) for number, line in enumerate(whole.split(b"\n")[:-1], start=1)]
        if not lines:
            lines = [RunLine(run=uuid4().hex[:8], settings=settings)]
            self._write(lines[0])
        first, *rest = lines
        if not isinstance(first, RunLine):
            raise SetupError(f"{path}, line 1: not the settings of an evaluation; choose another file: --out")
        if other := [name for name in settings if settings[name] != first.settings.get(name)]:
            raise SetupError(
                f"{path} was begun with another {', '.join(other)}: give the same options, or another file: --out"
            )
        self.run = first.run
        for number, line in enumerate(rest, start=2):
            if isinstance(line, RunLine):
                raise SetupError(f"{path}, line {number}: the settings of a second evaluation; remove this line")
            self._keep(line)

    def add(self, line: Line) -> None:
        """Write a line, to the disk."""
        self._write(line)
        self._keep(line)

    def _keep(self, line: Line) -> None:
        if isinstance(line, SessionLine):
            self.sessions.setdefault((line.arm, line.seed, line.user), []).append(line)
        elif isinstance(line, KnownLine):
            self.known = line.questions
        else:
            self.facts[line.arm, line.seed, line.user] = line

    def _write(self, line: RunLine | Line) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(line.model_dump_json().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SetupError(f"{self._path} cannot be written: {error.strerror}") from error

    def _parse(self, line: bytes, number: int) -> RunLine | Line:
        try:
            return _LINE.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise SetupError(
                f"{self._path}, line {number}: {where}: {first['msg']}; remove this line and run again"
            ) from error
