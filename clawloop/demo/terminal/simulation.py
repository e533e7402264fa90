"""The environment `terminal` in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping

from clawloop.demo.practice.folder_simulation import FolderSimulation
from clawloop.environments.harbor import HarborTask
from clawloop.environments.terminal.environment import generated_task


def simulate_terminal() -> FolderSimulation:
    return FolderSimulation(generated_task, _is_right)


def _is_right(task: HarborTask, files: Mapping[str, bytes]) -> bool:
    """As `inside/check.py` of the environment says it."""
    expected: dict[str, str | None] = json.loads(task.tests["expected.json"])
    found = {path: content.decode(errors="replace").strip() for path, content in files.items()}
    return all(found.get(path) == (None if wanted is None else wanted.strip()) for path, wanted in expected.items())
