"""Scripted conversations that the terminal model is pretrained on.

They know commands for each kind of task, but not when to run one and which: a third says that it is done without doing
anything, and of the commands two in five are another one than the task needs. So the model that rollouts begin with
solves about a third of the tasks, and everything that a right episode needs is among what it samples. Tasks are those
for training; no held-out task is in a lesson.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clawloop.contracts.turns import Message
from clawloop.demo.practice.toy import Course, call, with_commands
from clawloop.environments.harbor import HarborTask
from clawloop.environments.task import Split
from clawloop.environments.terminal.environment import generated_task

IDLE = 0.35
WRONG = 0.4
# Some look what is there before they act.
LOOKS = 0.2
# Training tasks have no end; lessons take theirs from so many.
_TASKS = 1_000_000
_DONE: Message = {"role": "assistant", "content": "Done."}
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


def conversations(seed: int) -> Iterator[list[Message]]:
    """Conversations without end, each from the task to the word that it is done."""
    rng = random.Random(f"terminal {seed}")
    while True:
        yield conversation(generated_task(Split.TRAIN, rng.randrange(_TASKS)), rng)


def conversation(task: HarborTask, rng: random.Random) -> list[Message]:
    """One conversation about a task, as a script of middling skill has it."""
    messages: list[Message] = [{"role": "user", "content": task.instruction}]
    if rng.random() < IDLE:
        return [*messages, _DONE]
    if rng.random() < LOOKS:
        messages += [call("bash", {"command": "ls"}), {"role": "tool", "content": "\n".join(sorted(task.start))}]
    skill, given = _skill(task.instruction)
    template = rng.choice(skill.wrong) if rng.random() < WRONG else skill.right
    command = _filled(template, given)
    messages += [call("bash", {"command": command}), {"role": "tool", "content": output_of(command, task)}]
    return [*messages, _DONE]


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
    """What the shell prints: nothing, unless a file is not there."""
    program, first, *_ = command.split()
    if program in ("cp", "mv") and first not in task.start:
        return f"{program}: cannot stat '{first}': No such file or directory"
    return ""


COURSE = Course(
    conversations=conversations,
    texts=with_commands,
    fixed=('{"name": "bash", "arguments": {"command": "', '"}}', _SUM, ")))"),
    vocabulary=1024,
    steps=700,
    lessons=24,
    knows="the environment's twelve kinds of tasks, a command or three for each, and nothing else",
    skill=f"say that they are done without doing anything in {IDLE:.0%} of the conversations, and of the commands "
    f"that they run {WRONG:.0%} are another one than the task needs",
)
