"""What a person asked the demo to do, read from words, so that a wrong one is one clear line.

Knows nothing about how it is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.demo.recipes import Method
from clawloop.errors import SetupError

SEED_LIMIT = 2**32
# A thousand interactions are two hours on two cores; more is a slip of the finger.
MOST_INTERACTIONS = 1000
MOST_RUNS = 100


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One user with one method, from the untrained model on."""

    seed: int
    method: Method

    @property
    def policy(self) -> str:
        """The policy this run teaches; no two runs share one."""
        return f"demo-{self.seed}-{self.method}"


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Args:
        interactions: requests of each run that may be learned from.
        paced: between two sessions the user waits until what has been said is learned.
    """

    runs: tuple[PlannedRun, ...]
    interactions: int
    paced: bool


def plan(seeds: str | None, seed: str | None, methods: str, interactions: int, *, paced: bool, batch: int) -> Plan:
    """
    Args:
        seeds: how many (`10` is 1 to 10), or a list with commas.
        seed: the one seed; seed 1 if neither is given.
        methods: with commas.
        batch: how many samples a step takes.

    Raises:
        SetupError: names the option and what it takes.
    """
    if seeds is not None and seed is not None:
        raise SetupError("--seed and --seeds: give one of them")
    chosen = _seeds(seeds) if seeds is not None else (_number(seed or "1", "--seed"),)
    if not batch <= interactions <= MOST_INTERACTIONS:
        raise SetupError(
            f"--interactions {interactions}: give {batch} to {MOST_INTERACTIONS}; a step takes {batch} samples"
        )
    runs = tuple(PlannedRun(number, method) for method in _methods(methods) for number in chosen)
    if len(runs) > MOST_RUNS:
        raise SetupError(f"{len(runs)} runs: at most {MOST_RUNS} at a time; give fewer --seeds or --methods")
    return Plan(runs, interactions, paced)


def _seeds(text: str) -> Sequence[int]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1:
        count = _number(parts[0], "--seeds")
        if count == 0:
            raise SetupError("--seeds 0: give how many seeds (10 is 1 to 10), or a list such as 3,5,8")
        return range(1, min(count, MOST_RUNS + 1) + 1)
    numbers = [_number(part, "--seeds") for part in parts if part]
    return list(dict.fromkeys(numbers))


def _number(text: str, option: str) -> int:
    # int() would take " 1_0 " and Arabic digits as well.
    if not (text.isascii() and text.isdigit()) or int(text) >= SEED_LIMIT:
        raise SetupError(f"{option} {text!r}: a seed is a whole number from 0 to {SEED_LIMIT - 1}")
    return int(text)


def _methods(text: str) -> list[Method]:
    chosen = []
    for word in dict.fromkeys(part.strip() for part in text.split(",")):
        if word not in set(Method):
            raise SetupError(f"--methods {word!r}: use {', '.join(Method)}, or several with commas")
        chosen.append(Method(word))
    return chosen
