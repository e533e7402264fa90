"""The kinds of tasks of our own environments, how hard each can be made, and how long episodes may take."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType

# Limits ---------------------------------------------------------------------------------------------------------------
# Time limits of episodes. A task that asks for more is refused when it is loaded, since no error would show later.

LONGEST_SECONDS = 4 * 3600.0
"""Longest run of an agent and of a verifier; if an environment of verifiers does both, of all its stages together."""
CALL_LIMIT = timedelta(seconds=LONGEST_SECONDS) + timedelta(hours=2)
"""Time limit of the activity around an agent or a verifier, which also pulls an image and waits for a gateway."""
KEY_LEAST_LEFT = timedelta(seconds=LONGEST_SECONDS) + timedelta(hours=1)
"""Least time left of an episode's key when its agent starts, since the gateway's clock may differ."""


# Kinds ----------------------------------------------------------------------------------------------------------------
# The kinds of tasks of our own environments, how hard each can be made, and the ids of such tasks.


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels of difficulty of a kind of task.

    Args:
        first: level at which a curriculum begins.
        hardest: highest level; the easiest is 1.
    """

    first: int
    hardest: int

    def holds(self, level: int) -> bool:
        return 1 <= level <= self.hardest


@dataclass(frozen=True, slots=True)
class ChosenKind:
    """The kind and level of a task's id, without its number."""

    kind: str
    level: int


def _all(levels: Levels, kinds: str) -> Mapping[str, Levels]:
    return MappingProxyType(dict.fromkeys(kinds.split(), levels))


_REASONING = (
    "aiw base_conversion basic_arithmetic binary_alternation count_bits count_primes course_schedule gcd largest_island"
    " lcm leg_counting letter_counting mahjong_puzzle maze number_filtering rotate_matrix rotten_oranges"
    " simple_equations simple_geometry string_manipulation string_splitting string_synthesis syllogism"
    " word_sequence_reversal"
)
KINDS: Mapping[str, Mapping[str, Levels]] = MappingProxyType(
    {
        "browser": _all(
            Levels(2, 3), "press write choose check pick date search steps tab dialog sort count agree mail"
        ),
        # The package has no curriculum for `acre`, and those of the next two end in errors above these levels (0.1.25).
        "reasoning-gym": MappingProxyType(
            {"acre": Levels(1, 1), "modulo_grid": Levels(1, 1), "caesar_cipher": Levels(1, 2)}
            | dict(_all(Levels(1, 3), _REASONING))
        ),
        "swe": _all(Levels(1, 3), "add subtract larger smaller same differ below above rest distance total count"),
        "terminal": _all(Levels(1, 3), "copy rename delete append replace sort count search join move head total"),
        "tool-call": _all(Levels(2, 6), "plus minus times"),
    }
)
"""Kinds of tasks by environment. An environment that is not here gives tasks by number only."""

_CHOSEN = re.compile(r"([a-z]+-[0-9]+)-([a-z_]+)-([0-9]{1,2})", re.ASCII)


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
