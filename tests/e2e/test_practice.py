"""`clawloop demo run --environment` with real parts only: sandboxes, vLLM, gateway, Temporal, PostgreSQL, trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clawloop.app.demo.practice_report import GAIN, GOAL

# A run ends after forty minutes; setting up, and measuring versions that newer ones followed too quickly, take as long
# again where others take the cores.
MAX_SECONDS = 5400
# Of the toys' seeds, one that nothing was tuned on.
SEED = 100
# Of any version after the goal was reached. 60 attempts leave an error of 0.06; versions of good runs were measured at
# 0.67 and above.
NO_COLLAPSE = 0.6


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(MAX_SECONDS + 300)
@pytest.mark.parametrize("environment", ["tool-call", "terminal", "swe"])
def test_a_toy_learns_in_sandboxes(environment: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clawloop.app.cli.main", "demo", "run", "--environment", environment]
    done = subprocess.run(
        [*command, "--seed", str(SEED), "--data", "data", "--json"],
        cwd=tmp_path,
        env=dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    [run] = report["runs"]
    assert run["gain"] >= GAIN, run  # of the last version
    assert run["seconds_to_goal"] is not None, (GOAL, run)
    assert run["least_after_goal"] >= NO_COLLAPSE, run
