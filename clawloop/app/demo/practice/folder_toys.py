"""Toys that work in a folder with a shell: the scripts of their lessons, and their tasks in this process.

The scripts know commands for each task, but not when to run one and which: some say that it is done without doing
anything, and some run another command than the task needs. So everything that a right episode needs is among what the
model samples, and rollouts show it which. Tasks are those for training; no held-out task is in a lesson.
"""

from __future__ import annotations

import asyncio
import io
import random
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from clawloop.app.demo.practice.toy import call
from clawloop.core.contracts.turns import Message
from clawloop.core.errors import SandboxFailed
from clawloop.environments.harbor import BASH, HarborTask
from clawloop.environments.inside.harness import OUTPUT
from clawloop.environments.task import Split, parse_task_id
from clawloop.sandboxes.boxes import BoxTask
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders

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


# A command of a toy takes milliseconds; one that waits for input that never comes is stopped.
_COMMAND_SECONDS = 5
_RUN = f"""
for attempt in /work/*; do
  mkdir -p $attempt/files && cd $attempt/files
  timeout {_COMMAND_SECONDS} bash -c "$(cat $attempt/command)" < /dev/null > $attempt/stdout 2> $attempt/stderr
done
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """
    Args:
        files: what is there afterwards.
        output: as the agent's tool returns it.
    """

    files: dict[str, bytes]
    output: str


def run_all(sandboxes: Bubblewrap, attempts: Sequence[tuple[Mapping[str, bytes], str]]) -> list[Ran]:
    """Run each command where its files are.

    Raises:
        SandboxFailed: the sandbox did not work, or what is left cannot be kept.
    """
    if not attempts:
        return []
    packed: dict[str, bytes] = {}
    for number, (files, command) in enumerate(attempts):
        packed[f"{number}/command"] = command.encode(errors="replace")
        packed |= {f"{number}/files/{path}": content for path, content in files.items()}
    box = BoxTask("commands", ("bash", "-c", _RUN), 60.0 + _COMMAND_SECONDS * len(attempts), archive=_archive(packed))
    result = asyncio.run(sandboxes.run(box))
    if result.problem is not None or result.exit_code is None:
        raise SandboxFailed(f"commands of {len(attempts)} attempts: {result.problem or 'stopped at the time limit'}")
    left = _files(result.artifact)
    ran = []
    for number in range(len(attempts)):
        folder = f"{number}/files/"
        files = {path.removeprefix(folder): content for path, content in left.items() if path.startswith(folder)}
        said = b"".join(left.get(f"{number}/{stream}", b"") for stream in ("stdout", "stderr"))
        ran.append(Ran(files, said.decode(errors="replace").strip()[-OUTPUT:]))
    return ran


def _archive(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def _files(packed: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = [(member.name, archive.extractfile(member)) for member in archive]
        return {name: file.read() for name, file in members if file is not None}


@dataclass(slots=True)
class Folder:
    """A task, and the files of its working folder now."""

    task: HarborTask
    files: dict[str, bytes]


class FolderSimulation:
    """Satisfies `clawloop.app.demo.practice.simulation.Simulation[Folder]`.

    Args:
        generate: a task by its split and number.
        is_right: what its verifier would say of these files.
    """

    agent = BASH

    def __init__(
        self,
        generate: Callable[[Split, int], HarborTask],
        is_right: Callable[[HarborTask, Mapping[str, bytes]], bool],
    ) -> None:
        self._generate = generate
        self._is_right = is_right
        self._sandboxes: Bubblewrap | None = None

    def begin(self, task_id: str) -> tuple[Folder, str]:
        task = self._generate(*parse_task_id(task_id))
        return Folder(task, dict(task.start)), task.instruction

    def run(self, states: Sequence[Folder], arguments: Sequence[str]) -> list[str]:
        if self._sandboxes is None:
            self._sandboxes = Bubblewrap.find(BoxFolders())
        commands = [(state.files, command) for state, command in zip(states, arguments, strict=True)]
        ran = run_all(self._sandboxes, commands)
        for state, done in zip(states, ran, strict=True):
            state.files = done.files
        return [done.output for done in ran]

    def rewards(self, states: Sequence[Folder], replies: Sequence[str]) -> list[float]:
        return [float(self._is_right(state.task, state.files)) for state in states]
