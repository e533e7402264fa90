"""The environment `terminal`: a dozen kinds of tasks with files and text, as Harbor task directories."""

from __future__ import annotations

import importlib.resources
import json
import random

from clawloop.environments.agent import CommandHarness
from clawloop.environments.harbor import HarborTask, environment_task
from clawloop.environments.task import EnvironmentTask, Split, parse_chosen_task_id
from clawloop.environments.terminal.kinds import KINDS, KINDS_BY_NAME, Scenario, repeated
from clawloop.episodes.kinds import ChosenKind

_TEST = b"python3 -I /tests/check.py\n"
_SECONDS = 600.0


class TerminalEnvironment:
    """Satisfies `clawloop.environments.task.Environment`."""

    name = "terminal"

    def __init__(self, harness: CommandHarness | None = None) -> None:
        self._harness = harness

    def task(self, task_id: str) -> EnvironmentTask:
        split, number, chosen = parse_chosen_task_id(self.name, task_id)
        return environment_task(task_id, generated_task(split, number, chosen), self._harness)


def generated_task(split: Split, number: int, chosen: ChosenKind | None = None) -> HarborTask:
    """The `number`-th task of a split: the kinds in turn, each with names and content of its own.

    A level is how often the task is to be done, on other files each time.
    """
    kind = KINDS[number % len(KINDS)] if chosen is None else KINDS_BY_NAME[chosen.kind]
    times = 1 if chosen is None else chosen.level
    drawn = random.Random(f"terminal {split} {number}")
    while True:
        task = as_harbor_task(repeated(kind, times, drawn))
        if task.split is split:
            return task


def as_harbor_task(scenario: Scenario) -> HarborTask:
    check = importlib.resources.files("clawloop.environments.terminal") / "inside" / "check.py"
    return HarborTask(
        instruction=scenario.instruction,
        start={path: content.encode() for path, content in scenario.start.items()},
        tests={
            "test.sh": _TEST,
            "check.py": check.read_bytes(),
            "expected.json": json.dumps({**scenario.start, **scenario.changed}).encode(),
        },
        solution={"solve.sh": scenario.solution.encode()},
        agent_seconds=_SECONDS,
    )
