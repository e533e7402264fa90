"""`clawloop demo run` with nothing stood in for: a synthetic user teaches the demo model through the gateway."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from clawloop.demo.report import GOAL

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.postgres, pytest.mark.timeout(900)]

# It promises 3 minutes on two cores that have nothing else to do; tests share theirs.
MOST_SECONDS = 840


def test_a_user_with_a_hidden_taste_teaches_it_in_64_interactions_without_a_failed_request(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clawloop.cli", "demo", "run", "--seed", "1", "--data", "data", "--json"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "demo-report.json").read_text())
    assert (report["seed"], report["method"], report["interactions"]) == (1, "combined", 64)
    assert 0.2 <= report["match_before"] <= 0.85
    assert report["match_after"] >= GOAL, done.stderr
    assert 0 < report["interactions_to_90"] <= 64
    assert report["exact_rate"] >= 0.95
    assert report["requests_failed"] == 0
    assert 3 <= report["versions"] <= report["steps"]
    assert (tmp_path / "demo-report.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "data" / "demo").exists()
    assert [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)] == []
