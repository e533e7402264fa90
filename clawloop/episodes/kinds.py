"""The kinds of tasks of our own environments, how hard each can be made, and the ids of such tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Levels:
    """How hard a kind of task can be made.

    Args:
        first: level of tasks that no curriculum chose.
        hardest: the easiest is 1.
    """

    first: int
    hardest: int

    def holds(self, level: int) -> bool:
        return 1 <= level <= self.hardest


@dataclass(frozen=True, slots=True)
class ChosenKind:
    """What a task's id asks for, beside its number."""

    kind: str
    level: int


def _all(levels: Levels, kinds: str) -> Mapping[str, Levels]:
    return MappingProxyType(dict.fromkeys(kinds.split(), levels))


KINDS: Mapping[str, Mapping[str, Levels]] = MappingProxyType(
    {
        "swe": _all(Levels(1, 3), "add subtract larger smaller same differ below above rest distance total count"),
        "terminal": _all(Levels(1, 3), "copy rename delete append replace sort count search join move head total"),
        "tool-call": _all(Levels(2, 6), "plus minus times"),
    }
)
"""Kinds of tasks by environment. An environment that is not here gives tasks by number only."""

_CHOSEN = re.compile(r"([a-z]+-[0-9]+)-([a-z]+)-([0-9]{1,2})", re.ASCII)


def chosen_task_id(number: int, chosen: ChosenKind) -> str:
    """The id of a training task of this kind and level, e.g. `train-17-times-3`."""
    return f"train-{number}-{chosen.kind}-{chosen.level}"


def split_task_id(environment: str, task_id: str) -> tuple[str, ChosenKind | None]:
    """The part of a task's id that any environment understands, and the kind that was chosen; None if none was, or the
    environment has no such kind or level."""
    match = _CHOSEN.fullmatch(task_id)
    if match is None:
        return task_id, None
    numbered, kind, level = match[1], match[2], int(match[3])
    levels = KINDS.get(environment, {}).get(kind)
    return (numbered, ChosenKind(kind, level)) if levels is not None and levels.holds(level) else (task_id, None)
