"""The environment `swe` in this process."""

from __future__ import annotations

from collections.abc import Mapping

from clawloop.demo.practice.folder_simulation import FolderSimulation
from clawloop.demo.swe.lessons import module_and_function
from clawloop.environments.harbor import HarborTask
from clawloop.environments.swe.environment import generated_repository


def simulate_swe() -> FolderSimulation:
    return FolderSimulation(generated_repository, _is_right)


def _is_right(task: HarborTask, files: Mapping[str, bytes]) -> bool:
    """Whether the module reads as it should.

    Unlike `inside/check.py` of the environment it runs nothing, which is quicker, and refuses a function that is right
    in other words.
    """
    module, function = module_and_function(task)
    before = task.start[module].decode()
    wanted = before.replace(f"return {function.wrong}\n", f"return {function.right}\n")
    return files.get(module) == wanted.encode()
