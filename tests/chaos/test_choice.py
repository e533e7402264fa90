"""Which faults a run of `make chaos` injects."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from clawloop.core.crash_points import CrashPoint
from tests.chaos.faults import CRASH, Fault, all_faults, choose
from tests.chaos.stack import Stack


async def _never(stack: Stack, chance: random.Random) -> None:
    raise AssertionError("only chosen, not injected")


FAULTS = [Fault("kill judge", _never, 100.0), *(Fault(f"{CRASH}{point}", _never, 0.001) for point in CrashPoint)]


@pytest.mark.parametrize("seed", range(20))
def test_each_crash_point_is_among_enough_faults(seed: int) -> None:
    kinds = Counter(fault.kind for fault in choose(FAULTS, 2 * len(CrashPoint), random.Random(seed)))
    assert kinds.total() == 2 * len(CrashPoint)
    assert {kind for kind in kinds if kind.startswith(CRASH)} == {f"{CRASH}{point}" for point in CrashPoint}


def test_few_faults_are_chosen_too() -> None:
    kinds = [fault.kind for fault in choose(FAULTS, 5, random.Random(1))]
    assert sum(kind.startswith(CRASH) for kind in kinds) == 2


def test_a_seed_chooses_the_same_faults_again() -> None:
    first, again, other = ([fault.kind for fault in choose(FAULTS, 50, random.Random(seed))] for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("several", "more"),
    [
        ({"ranks": 2}, ["kill trainer's rank", "stop trainer's rank", "stop trainer's rank for long"]),
        ({"judges": 2}, ["stop one judge", "stop one judge for long"]),
    ],
)
def test_where_there_are_several_one_of_them_is_killed_or_stopped(several: dict[str, int], more: list[str]) -> None:
    one: dict[str, int] = {"ranks": 1, "judges": 1, "own_engine": False, "practises": False}
    stacks = [cast(Stack, SimpleNamespace(ours=("gateway",), **counts)) for counts in (one, one | several)]
    alone, together = ([fault.kind for fault in all_faults(stack)] for stack in stacks)
    # At the end, so that a seed chooses the same faults as ever where there is one.
    assert together == [*alone, *more]
