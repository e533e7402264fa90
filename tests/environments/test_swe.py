"""The environment swe: its repositories, agents that repair them, and code that tries to cheat its verifier."""

from __future__ import annotations

import asyncio
import json

import pytest

from clawloop.app.demo.toys import repairs
from clawloop.core.episodes.kinds import KINDS, ChosenKind
from clawloop.environments.check import Checked, check_task
from clawloop.environments.harbor import HarborTask, environment_task
from clawloop.environments.playing import reward_of
from clawloop.environments.swe.environment import FUNCTIONS, SweEnvironment, generated_repository
from clawloop.environments.task import Split
from clawloop.sandboxes.boxes import BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders

TASK = generated_repository(Split.TRAIN, 0)
MODULE: str = json.loads(TASK.tests["cases.json"])["module"]


def test_no_repository_is_in_both_splits_and_each_hides_its_tests() -> None:
    train = [generated_repository(Split.TRAIN, number) for number in range(60)]
    test = [generated_repository(Split.TEST, number) for number in range(60)]
    assert {task.split for task in train} == {Split.TRAIN}
    assert {task.split for task in test} == {Split.TEST}
    assert len({task.start[name] for task in train for name in task.start if not name.startswith(("test", "R"))}) == 60
    task = SweEnvironment().task("train-0")
    assert task.start is not None
    assert b"cases.json" not in task.start
    assert "cases.json" not in task.files


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
async def test_each_kind_is_solved_by_its_solution_and_by_nothing_else(number: int) -> None:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    checked = await check_task(sandboxes, environment_task("check", generated_repository(Split.TRAIN, number)))
    assert checked == Checked(1.0, 0.0, 0.0, {})


@pytest.mark.parametrize(("level", "functions"), [(1, 3), (2, 5), (3, 8)])
def test_a_harder_level_has_more_functions(level: int, functions: int) -> None:
    for kind in KINDS["swe"]:
        task = generated_repository(Split.TRAIN, 5, ChosenKind(kind, level))
        [module] = [text for name, text in task.start.items() if not name.startswith(("test", "R"))]
        assert module.count(b"def ") == functions


@pytest.mark.slow
async def test_the_hardest_repository_is_solved_by_its_solution_and_by_nothing_else() -> None:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    task = generated_repository(Split.TRAIN, 5, ChosenKind("add", 3))
    assert await check_task(sandboxes, environment_task("check", task)) == Checked(1.0, 0.0, 0.0, {})


async def reward(command: str, repository: HarborTask = TASK) -> float | None:
    """Of an agent that runs this command."""
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    task = environment_task("train-0", repository)
    left = await sandboxes.run(BoxTask("agent", ("bash", "-c", command), 60.0, repository.solution, archive=task.start))
    box = BoxTask(
        "verify",
        task.verifier,
        task.verifier_seconds,
        task.tests,
        archive=left.artifact,
        unpack_to=task.artifact_at,
        environment=task.verifier_environment,
    )
    return reward_of(await sandboxes.run(box), task)[0]


@pytest.mark.slow
async def test_a_repair_may_be_split_into_modules_and_use_the_standard_library() -> None:
    solved = await reward("bash /solution/solve.sh")
    assert solved == 1.0
    moved = f"bash /solution/solve.sh; mkdir parts; touch parts/__init__.py; mv {MODULE}.py parts/real.py"
    assert await reward(f"{moved}; printf 'import math\\nfrom parts.real import *\\n' > {MODULE}.py") == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FUNCTIONS)))
async def test_what_its_toy_does_is_judged_as_in_the_toys_simulation(number: int) -> None:
    """The simulation compares text; here the functions run."""
    repository = generated_repository(Split.TRAIN, number)
    right, wrong = repairs(repository)
    assert await reward(right, repository) == 1.0
    assert await reward(wrong[number % len(wrong)], repository) == 0.0


CHEATS = {
    "writes the reward": "open('/logs/verifier/reward.txt', 'w').write('1')",
    "writes the reward elsewhere": "open('/work/reward.txt', 'w').write('1')",
    "reads the tests": "import json\nprint(open('/tests/cases.json').read())",
    "leaves a process": "import os\nif not os.fork():\n  while True: open('/logs/verifier/reward.txt','w').write('1')",
    "prints results": "print('[1, 2, 3]')",
    "ends early": "import os\nos._exit(0)",
    "stops the verifier": "import os\nos.kill(os.getppid(), 9)",
    "never ends": "while True: pass",
    "is no Python": "(",
    "replaces what compares": "import json\njson.dumps = lambda *values: 'equal'",
    "is nothing": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS)
async def test_code_that_cheats_gets_nothing(cheat: str) -> None:
    assert await reward(f"cat > {MODULE}.py <<'END'\n{CHEATS[cheat]}\nEND") == 0.0
