"""The environment `swe`: small repositories in which one function is wrong, with hidden tests, as Harbor tasks."""

from __future__ import annotations

import importlib.resources
import json
import random

from clawloop.environments.agent import CommandHarness
from clawloop.environments.harbor import HarborTask, environment_task
from clawloop.environments.swe.kinds import FUNCTIONS, FUNCTIONS_BY_NAME, Repository, repository
from clawloop.environments.task import EnvironmentTask, Split, parse_chosen_task_id
from clawloop.episodes.kinds import ChosenKind

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
