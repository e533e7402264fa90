"""The toy that learns to repair a function in a repository.

Its lessons are scripted conversations. A right script replaces the wrong expression. The others replace it the wrong
way round, by nothing, in all functions, or make the visible test say the opposite. About a third of the scripts
repairs the repository.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from clawloop.app.demo.practice.folder_toys import FolderSimulation, ShellScripts
from clawloop.app.demo.practice.toy import Course, Toy, with_commands
from clawloop.environments.harbor import HarborTask
from clawloop.environments.swe.environment import FUNCTIONS, Function, SweEnvironment, generated_repository

IDLE = 0.3
WRONG = 0.5
# Some read the module before they change it.
LOOKS = 0.4
_ASKED = re.compile(r"\w+ in (\w+\.py) is wrong: it must return (.+)\. Correct it and nothing else\.")


def module_and_function(task: HarborTask) -> tuple[str, Function]:
    """The file with the wrong function, and what it should be."""
    asked = _ASKED.fullmatch(task.instruction)
    assert asked is not None, task.instruction
    return asked[1], next(function for function in FUNCTIONS if function.meaning == asked[2])


def commands(task: HarborTask) -> tuple[str, tuple[str, ...]]:
    """The command that repairs the repository, and others, which do not."""
    module, function = module_and_function(task)
    return _replace(function.wrong, function.right, module), (
        _replace(function.right, function.wrong, module),
        _replace(function.wrong, "None", module),
        _replace("return .*", f"return {function.right}", module),
        _replace("==", "!=", f"test_{module}"),
    )


def _replace(old: str, new: str, file: str) -> str:
    return f"sed -i 's|{old}|{new}|' {file}"


def _look(task: HarborTask) -> tuple[str, str]:
    module, _ = module_and_function(task)
    return f"cat {module}", task.start[module].decode().strip()


SCRIPTS = ShellScripts(
    environment="swe",
    generate=generated_repository,
    commands=commands,
    look=_look,
    output_of=lambda command, task: "",  # sed prints nothing
    idle=IDLE,
    looks=LOOKS,
    wrong=WRONG,
)
COURSE = Course(
    conversations=SCRIPTS.conversations,
    texts=with_commands,
    fixed=('{"name": "bash", "arguments": {"command": "', '"}}'),
    vocabulary=768,
    steps=700,
    lessons=24,
    knows="the environment's twelve functions, five ways to change one, of which one is right, and nothing else",
    skill=f"say that they are done without doing anything in {IDLE:.0%} of the conversations, and {WRONG:.0%} of the "
    "changes that they make are another one than the function needs",
)


def simulate_swe() -> FolderSimulation:
    return FolderSimulation(generated_repository, _is_right)


def _is_right(task: HarborTask, files: Mapping[str, bytes]) -> bool:
    """True if the module's text is the expected one.

    Unlike `inside/check.py` of the environment this runs nothing, which is quicker, and refuses a right function that
    is written differently.
    """
    module, function = module_and_function(task)
    before = task.start[module].decode()
    wanted = before.replace(f"return {function.wrong}\n", f"return {function.right}\n")
    return files.get(module) == wanted.encode()


SWE = Toy(
    environment=SweEnvironment.name,
    make=SweEnvironment,
    simulate=simulate_swe,
    base_model="clawloop-swe",
    folder=Path(__file__).with_name("model"),
    course=COURSE,
    max_tokens=48,
    batch_groups=8,
    versions=30,
)
