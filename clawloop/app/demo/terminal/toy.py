"""The toy that learns to work in a terminal.

Its lessons are scripted conversations. A third of the scripts says that it is done without doing anything, and of the
commands two in five are another one than the task needs. So the model that rollouts begin with solves about a third
of the tasks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clawloop.app.demo.practice.folder_toys import FolderSimulation, ShellScripts
from clawloop.app.demo.practice.toy import Course, Toy, with_commands
from clawloop.environments.harbor import HarborTask
from clawloop.environments.terminal.environment import TerminalEnvironment, generated_task

IDLE = 0.35
WRONG = 0.4
# Some look what is there before they act.
LOOKS = 0.2
# No awk: on Debian it is a link to outside of what sandboxes see.
_SUM = "echo $(($(paste -sd+"


@dataclass(frozen=True, slots=True)
class Skill:
    """
    Args:
        asked: the instruction; its groups are $1, $2, $3 of the commands.
        right: the command that does it.
        wrong: others, which do something else.
    """

    asked: str
    right: str
    wrong: tuple[str, ...]


SKILLS = (
    Skill(r"Copy (\S+) to (\S+)\.", "cp $1 $2", ("mv $1 $2", "cp $2 $1")),
    Skill(r"Rename (\S+) to (\S+)\.", "mv $1 $2", ("cp $1 $2", "mv $2 $1")),
    Skill(r"Delete (\S+) and keep (\S+)\.", "rm $1", ("rm $2", "rm $1 $2")),
    Skill(r'Add the line "(.+)" at the end of (\S+)\.', "echo '$1' >> $2", ("echo '$1' > $2", "touch $2")),
    Skill(
        r'Replace every "(\w+)" in (\S+) by "(\w+)"\.',
        "sed -i 's/$1/$3/g' $2",
        ("sed -i 's/$3/$1/g' $2", "sed -i '/$1/d' $2"),
    ),
    Skill(r"Sort the lines of (\S+)\.", "sort -o $1 $1", ("sort -r -o $1 $1", "touch $1")),
    Skill(r"Write the number of lines of (\S+) to (\S+)\.", "wc -l < $1 > $2", ("wc -c < $1 > $2", "cp $1 $2")),
    Skill(
        r'Write the lines of (\S+) that contain "(\w+)" to (\S+)\.',
        "grep $2 $1 > $3",
        ("grep -v $2 $1 > $3", "cp $1 $3"),
    ),
    Skill(r"Write (\S+) and then (\S+) to (\S+)\.", "cat $1 $2 > $3", ("cat $2 $1 > $3", "cp $1 $3")),
    Skill(
        r"Make a folder (\S+) and move (\S+) into it\.",
        "mkdir $1 && mv $2 $1/",
        ("mkdir $1 && cp $2 $1/", "mv $2 $1"),
    ),
    Skill(r"Write the first (\d) lines of (\S+) to (\S+)\.", "head -n $1 $2 > $3", ("tail -n $1 $2 > $3", "cp $2 $3")),
    Skill(
        r"Each line of (\S+) is a number\. Write their sum to (\S+)\.",
        f"{_SUM} $1))) > $2",
        ("wc -l < $1 > $2", "cp $1 $2"),
    ),
)


def commands(task: HarborTask) -> tuple[str, list[str]]:
    """The right command for a task, and the wrong ones."""
    skill, given = _skill(task.instruction)
    return _filled(skill.right, given), [_filled(template, given) for template in skill.wrong]


def _skill(instruction: str) -> tuple[Skill, Sequence[str]]:
    for skill in SKILLS:
        if found := re.fullmatch(skill.asked, instruction):
            return skill, found.groups()
    raise AssertionError(f"no skill for {instruction!r}")


def _filled(template: str, given: Sequence[str]) -> str:
    return re.sub(r"\$(\d)", lambda place: given[int(place[1]) - 1], template)


def output_of(command: str, task: HarborTask) -> str:
    """The shell's output: empty, unless a file is missing."""
    program, first, *_ = command.split()
    if program in ("cp", "mv") and first not in task.start:
        return f"{program}: cannot stat '{first}': No such file or directory"
    return ""


SCRIPTS = ShellScripts(
    environment="terminal",
    generate=generated_task,
    commands=commands,
    look=lambda task: ("ls", "\n".join(sorted(task.start))),
    output_of=output_of,
    idle=IDLE,
    looks=LOOKS,
    wrong=WRONG,
)
COURSE = Course(
    conversations=SCRIPTS.conversations,
    texts=with_commands,
    fixed=('{"name": "bash", "arguments": {"command": "', '"}}', _SUM, ")))"),
    vocabulary=1024,
    steps=1500,
    lessons=24,
    knows="the environment's twelve kinds of tasks, a command or three for each, and nothing else",
    skill=f"say that they are done without doing anything in {IDLE:.0%} of the conversations, and of the commands "
    f"that they run {WRONG:.0%} are another one than the task needs",
)


def simulate_terminal() -> FolderSimulation:
    return FolderSimulation(generated_task, _is_right)


def _is_right(task: HarborTask, files: Mapping[str, bytes]) -> bool:
    """True if the files are right, by the rule of the environment's `inside/check.py`."""
    expected: dict[str, str | None] = json.loads(task.tests["expected.json"])
    found = {path: content.decode(errors="replace").strip() for path, content in files.items()}
    return all(found.get(path) == (None if wanted is None else wanted.strip()) for path, wanted in expected.items())


TERMINAL = Toy(
    environment=TerminalEnvironment.name,
    make=TerminalEnvironment,
    simulate=simulate_terminal,
    base_model="clawloop-terminal",
    folder=Path(__file__).with_name("model"),
    course=COURSE,
    max_tokens=48,
    batch_groups=8,
    versions=30,
)
