"""Tasks in a working folder, in this process: commands of all attempts run in one sandbox, files are compared here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from clawloop.demo.practice.shared_sandbox import run_all
from clawloop.environments.harbor import BASH, HarborTask
from clawloop.environments.task import Split, parse_task_id
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders


@dataclass(slots=True)
class Folder:
    """A task, and the files of its working folder now."""

    task: HarborTask
    files: dict[str, bytes]


class FolderSimulation:
    """Satisfies `clawloop.demo.practice.simulation.Simulation[Folder]`.

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
