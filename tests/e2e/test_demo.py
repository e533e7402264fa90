"""`clawloop demo run` with real parts only: a synthetic user teaches the demo model through the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from clawloop.demo.report import GOAL

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.postgres, pytest.mark.timeout(5700)]

# A run takes 3 minutes on two idle cores, and ten times that where others take them.
MAX_SECONDS = 1800
# One miss may be chance: the judge is wrong about every twelfth of the user's wordings. Three in a row are a fault.
SEEDS = (1, 2, 3)
# Lowest share of right content in 60 answers of any version; 0.82 to 1.0 was measured with six seeds over twice as many
# interactions.
MIN_EXACT = 0.75


def test_it_learns_a_hidden_preference_in_64_interactions_without_a_failed_request(tmp_path: Path) -> None:
    reports = []
    for seed in SEEDS:
        reports.append(_run(tmp_path, seed))
        if reports[-1]["match_after"] >= GOAL and reports[-1]["exact_least"] >= MIN_EXACT:
            break
    report = reports[-1]
    assert report["match_after"] >= GOAL, reports
    assert 0.2 <= report["match_before"] <= 0.85
    assert 0 < report["interactions_to_90"] <= 64
    assert report["exact_least"] >= MIN_EXACT, reports
    assert (tmp_path / "demo-report.png").read_bytes().startswith(b"\x89PNG")


def _run(folder: Path, seed: int) -> dict[str, Any]:
    """Run a demo and check what holds for every run; returns its report."""
    command = [
        sys.executable,
        "-m",
        "clawloop.cli.main",
        "demo",
        "run",
        "--seed",
        str(seed),
        "--data",
        "data",
        "--json",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env=dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report == json.loads((folder / "demo-report.json").read_text())
    assert (report["seed"], report["method"], report["interactions"]) == (seed, "combined", 64)
    assert report["requests_failed"] == 0
    assert 3 <= report["versions"] <= report["steps"]
    assert not (folder / "data" / "demo").exists()
    assert [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)] == []
    return report
