"""The environment `swe`: small repositories in which one function is wrong, with hidden tests, as Harbor tasks."""

from __future__ import annotations

import importlib.resources
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clawloop.core.episodes.kinds import ChosenKind
from clawloop.environments.harbor import HarborTask, environment_task
from clawloop.environments.task import CommandHarness, EnvironmentTask, Split, parse_chosen_task_id

# Kinds ----------------------------------------------------------------------------------------------------------------
# Small repositories with one wrong function each, and what its hidden tests call.

_MODULES = ("shapes", "stock", "prices", "scores", "orders", "units", "points", "rates", "games", "tools")
# Of each function; a wrong one must give another result for at least two of them.
_CASES = 6


@dataclass(frozen=True, slots=True)
class Function:
    """
    Args:
        names: that it may have.
        meaning: what it returns.
        right, wrong: expressions of its parameters.
    """

    names: tuple[str, ...]
    parameters: tuple[str, ...]
    meaning: str
    right: str
    wrong: str
    call: Callable[..., Any]
    call_wrong: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Repository:
    """
    Args:
        files: by path.
        cases: hidden tests: a function's name, its arguments and what it must return.
        solution: a shell script that corrects it.
    """

    instruction: str
    module: str
    files: Mapping[str, str]
    cases: Sequence[tuple[str, list[Any], Any]]
    solution: str


_TWO, _ITEMS = ("a", "b"), ("items",)
# No expression has a character that is special in a pattern of sed.
FUNCTIONS = (
    Function(("add", "plus"), _TWO, "the sum of a and b", "a + b", "a - b", lambda a, b: a + b, lambda a, b: a - b),
    Function(("subtract", "minus"), _TWO, "a less b", "a - b", "b - a", lambda a, b: a - b, lambda a, b: b - a),
    Function(("larger", "top"), _TWO, "the larger of a and b", "max(a, b)", "min(a, b)", max, min),
    Function(("smaller", "low"), _TWO, "the smaller of a and b", "min(a, b)", "max(a, b)", min, max),
    Function(
        ("same", "equal"),
        _TWO,
        "whether a and b are equal",
        "a == b",
        "a != b",
        lambda a, b: a == b,
        lambda a, b: a != b,
    ),
    Function(
        ("differ", "unequal"),
        _TWO,
        "whether a and b are different",
        "a != b",
        "a == b",
        lambda a, b: a != b,
        lambda a, b: a == b,
    ),
    Function(
        ("below", "less"), _TWO, "whether a is less than b", "a < b", "a > b", lambda a, b: a < b, lambda a, b: a > b
    ),
    Function(
        ("above", "more"), _TWO, "whether a is more than b", "a > b", "a < b", lambda a, b: a > b, lambda a, b: a < b
    ),
    Function(
        ("rest", "remainder"),
        _TWO,
        "the remainder of a divided by b",
        "a % b",
        "a // b",
        lambda a, b: a % b,
        lambda a, b: a // b,
    ),
    Function(
        ("distance", "gap"),
        _TWO,
        "how far a is from b, never negative",
        "abs(a - b)",
        "abs(a + b)",
        lambda a, b: abs(a - b),
        lambda a, b: abs(a + b),
    ),
    Function(("total", "whole"), _ITEMS, "the sum of all items", "sum(items)", "len(items)", sum, len),
    Function(("count", "number"), _ITEMS, "how many items there are", "len(items)", "sum(items)", len, sum),
)

FUNCTIONS_BY_NAME: Mapping[str, Function] = {function.names[0]: function for function in FUNCTIONS}


def repository(function: Function, rng: random.Random, right: int = 2) -> Repository:
    """A module with this function, which is wrong, and so many right ones."""
    module, name = rng.choice(_MODULES), rng.choice(function.names)
    # The wrong expression stands once, and no right one of another looks like it.
    others = [other for other in FUNCTIONS if other is not function and other.right not in function.wrong]
    others = [other for other in others if function.wrong not in other.right]
    beside = {rng.choice(other.names): other for other in rng.sample(others, right)}
    named = [(name, function), *beside.items()]
    cases = [case for each, of_name in named for case in _cases(each, of_name, rng)]
    rng.shuffle(named)
    text = "\n\n".join(
        f"def {each}({', '.join(one.parameters)}):\n"
        f'    """Return {one.meaning}."""\n'
        f"    return {one.wrong if one is function else one.right}\n"
        for each, one in named
    )
    shown = next(iter(beside))
    called, arguments, result = next(case for case in cases if case[0] == shown)
    call = f"{called}({', '.join(map(repr, arguments))})"
    return Repository(
        instruction=f"{name} in {module}.py is wrong: it must return {function.meaning}. Correct it and nothing else.",
        module=module,
        files={
            f"{module}.py": f'"""Functions for {module}."""\n\n\n{text}',
            f"test_{module}.py": f"from {module} import {called}\n\n\ndef test_{called}():\n"
            f"    assert {call} == {result!r}\n",
            "README.md": f"# {module}\n\nFunctions for {module}.\n",
        },
        cases=cases,
        solution=f"sed -i 's|return {function.wrong}$|return {function.right}|' {module}.py",
    )


def _cases(name: str, function: Function, rng: random.Random) -> list[tuple[str, list[Any], Any]]:
    while True:
        drawn = [_arguments(function, rng) for _ in range(_CASES)]
        if sum(function.call(*given) != function.call_wrong(*given) for given in drawn) >= 2:
            return [(name, given, function.call(*given)) for given in drawn]


def _arguments(function: Function, rng: random.Random) -> list[Any]:
    if function.parameters == _ITEMS:
        return [[rng.randint(2, 50) for _ in range(rng.randint(2, 6))]]
    first = rng.randint(1, 60)
    return [first, first if rng.random() < 0.3 else rng.randint(1, 60)]


# The environment ------------------------------------------------------------------------------------------------------
# The environment `swe`: small repositories in which one function is wrong, with hidden tests, as Harbor tasks.

_TEST = b"python3 -I /tests/check.py\n"
_SECONDS = 600.0
_BESIDE = (2, 4, 7)


class SweEnvironment:
    """Satisfies `clawloop.environments.task.Environment`."""

    name = "swe"

    def __init__(self, harness: CommandHarness | None = None) -> None:
        self._harness = harness

    def task(self, task_id: str) -> EnvironmentTask:
        split, number, chosen = parse_chosen_task_id(self.name, task_id)
        return environment_task(task_id, generated_repository(split, number, chosen), self._harness)


def generated_repository(split: Split, number: int, chosen: ChosenKind | None = None) -> HarborTask:
    """The `number`-th task of a split: the wrong functions in turn, each in a repository of its own.

    A level says among how many right functions the wrong one stands.
    """
    function = FUNCTIONS[number % len(FUNCTIONS)] if chosen is None else FUNCTIONS_BY_NAME[chosen.kind]
    beside = _BESIDE[0 if chosen is None else chosen.level - 1]
    drawn = random.Random(f"swe {split} {number}")
    while True:
        task = _as_harbor_task(repository(function, drawn, beside))
        if task.split is split:
            return task


def _as_harbor_task(made: Repository) -> HarborTask:
    check = importlib.resources.files("clawloop.environments.swe") / "inside" / "check.py"
    return HarborTask(
        instruction=made.instruction,
        start={path: content.encode() for path, content in made.files.items()},
        tests={
            "test.sh": _TEST,
            "check.py": check.read_bytes(),
            "cases.json": json.dumps({"module": made.module, "cases": made.cases}).encode(),
        },
        solution={"solve.sh": made.solution.encode()},
        agent_seconds=_SECONDS,
    )
