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

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(5700)]

# A run takes 3 minutes on two idle cores, and ten times that where others take them.
MAX_SECONDS = 1800
# It took 19 minutes on two idle cores (docs/demo.md).
MAX_SECONDS_WITH_FAULTS = 5400
# Each user has to reach the bars.
SEEDS = [(1,), pytest.param((2, 3), marks=pytest.mark.long)]
# Each is killed once before any of them is again, vLLM as the eighth: that takes one or two minutes, and the run takes
# four even without faults. Each was killed 7 times on two busy cores, 11 times on idle ones.
KILLED = {"postgres", "temporal", "vllm", "gateway-0", "gateway-1", "combined-worker", "trainer"}
# Lowest share of right content in 60 answers of any version. The demo's bar is 0.95, which ten users met in each of 551
# versions (docs/results.md); a version that just passes the gate, with 0.97, misses 0.9 in one of 480 evaluations.
MIN_EXACT = 0.9


@pytest.mark.parametrize("seeds", SEEDS, ids=["one user", "two users"])
def test_it_learns_hidden_preferences_in_64_interactions_without_a_failed_request(
    seeds: tuple[int, ...], tmp_path: Path
) -> None:
    reports = _run(tmp_path, "--seeds", ",".join(map(str, seeds)))
    assert [report["seed"] for report in reports] == list(seeds)
    for report in reports:
        assert (report["method"], report["interactions"], report["requests_failed"]) == ("combined", 64, 0)
        assert (report["recorded"], report["gave_up"]) == (64, None), report
        assert 0.2 <= report["match_before"] <= 0.85
        # The last version's is 60 sampled answers; that it was reached is what cannot be chance.
        assert report["interactions_to_90"] is not None, report
        assert 0 < report["interactions_to_90"] <= 64
        assert report["exact_least"] >= MIN_EXACT, report
        assert 3 <= report["steps"] <= report["versions"]
        # The gate asked each version its probes on the engine.
        assert report["probed"] == report["versions"], report
        assert report["stopped"] is None
    assert (tmp_path / "demo-report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_it_learns_while_its_parts_are_killed(tmp_path: Path) -> None:
    """Requests may fail, as the client's connection to a killed gateway does; the user says it again."""
    [report] = _run(tmp_path, "--faults", within_seconds=MAX_SECONDS_WITH_FAULTS)
    assert report["faults"].keys() == KILLED, report
    assert report["interactions"] == 64
    assert (report["recorded"], report["gave_up"]) == (64, None), report
    assert report["interactions_to_90"] is not None, report
    assert report["exact_least"] >= MIN_EXACT, report
    assert report["stopped"] is None


def _run(folder: Path, *options: str, within_seconds: float = MAX_SECONDS) -> list[dict[str, Any]]:
    """Run a demo and check what holds for every run; returns the reports of its users."""
    command = [
        sys.executable,
        "-m",
        "clawloop.app.cli.main",
        "demo",
        "run",
        "--quick",
        *options,
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
        timeout=within_seconds,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report == json.loads((folder / "demo-report.json").read_text())
    assert not (folder / "data" / "demo").exists()
    assert _left_over(folder) == []
    reports: list[dict[str, Any]] = report["runs"]
    return reports


def _left_over(folder: Path) -> list[psutil.Process]:
    """Processes that work in the folder or below it, as PostgreSQL does in its data directory, even if that is gone."""
    found = psutil.process_iter(["cwd"])
    return [process for process in found if process.info["cwd"] and Path(process.info["cwd"]).is_relative_to(folder)]
