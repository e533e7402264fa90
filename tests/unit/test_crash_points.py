"""A crash point kills its process once, where it is armed, and is in one place of the code."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clawloop.core.crash_points import CrashPoint

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from clawloop.core.crash_points import CrashPoint, arm_crash_points, crash_point
crash_point(CrashPoint.CLAIMED)  # not looked for yet
arm_crash_points(Path(sys.argv[1]))
crash_point(CrashPoint.COMMITTED)
crash_point(CrashPoint.CLAIMED)
"""


def test_an_armed_point_kills_the_first_process_that_reaches_it(tmp_path: Path) -> None:
    (tmp_path / CrashPoint.CLAIMED).touch()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    assert [subprocess.run(command, cwd=ROOT).returncode for _ in range(2)] == [-signal.SIGKILL, 0]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("point", CrashPoint, ids=str)
def test_each_point_is_in_one_place(point: CrashPoint) -> None:
    sources = [path for folder in ("activities", "api", "clawloop", "db") for path in (ROOT / folder).rglob("*.py")]
    used = [path for path in sources for _ in re.findall(rf"CrashPoint\.{point.name}\b", path.read_text())]
    assert len(used) == 1
