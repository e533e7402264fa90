"""Scripted conversations about tasks in a working folder: what toys with a shell are pretrained on.

The scripts know commands for each task, but not when to run one and which: some say that it is done without doing
anything, and some run another command than the task needs. So everything that a right episode needs is among what the
model samples, and rollouts show it which. Tasks are those for training; no held-out task is in a lesson.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from clawloop.contracts.turns import Message
from clawloop.demo.practice.toy import call
from clawloop.environments.harbor import HarborTask
from clawloop.environments.task import Split

# Training tasks have no end; lessons take theirs from so many.
_TASKS = 1_000_000
_DONE: Message = {"role": "assistant", "content": "Done."}


@dataclass(frozen=True, slots=True)
class ShellScripts:
    """
    Args:
        environment: its name, a part of the seed.
        generate: a task by its split and number.
        commands: the right command for a task, and wrong ones.
        look: the command that shows what is there, and what it prints.
        output_of: what the shell prints for one of `commands`.
        idle: share of the conversations that do nothing; looks: of the others, those that look first; wrong: those that
            run a wrong command.
    """

    environment: str
    generate: Callable[[Split, int], HarborTask]
    commands: Callable[[HarborTask], tuple[str, Sequence[str]]]
    look: Callable[[HarborTask], tuple[str, str]]
    output_of: Callable[[str, HarborTask], str]
    idle: float
    looks: float
    wrong: float

    def conversations(self, seed: int) -> Iterator[list[Message]]:
        """Conversations without end, each from the task to the word that it is done."""
        rng = random.Random(f"{self.environment} {seed}")
        while True:
            yield self.conversation(self.generate(Split.TRAIN, rng.randrange(_TASKS)), rng)

    def conversation(self, task: HarborTask, rng: random.Random) -> list[Message]:
        """One conversation about a task, as a script of middling skill has it."""
        messages: list[Message] = [{"role": "user", "content": task.instruction}]
        if rng.random() < self.idle:
            return [*messages, _DONE]
        if rng.random() < self.looks:
            messages += _ran(*self.look(task))
        right, wrong = self.commands(task)
        command = rng.choice(wrong) if rng.random() < self.wrong else right
        return [*messages, *_ran(command, self.output_of(command, task)), _DONE]


def _ran(command: str, output: str) -> list[Message]:
    return [call("bash", {"command": command}), {"role": "tool", "content": output}]
