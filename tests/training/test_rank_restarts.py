"""Ranks restarted by torchrun join each other, not the ranks that died."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RESTARTS = 1


@pytest.mark.long
@pytest.mark.timeout(200)
def test_restarted_ranks_join_at_the_first_attempt(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.training.joining_rank", "agent", str(tmp_path), str(RESTARTS)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr[-2000:]
    joined = {path.name for path in tmp_path.iterdir()}
    assert joined == {f"{attempt}-{rank}" for attempt in range(RESTARTS + 1) for rank in range(2)}
