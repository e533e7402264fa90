"""The guard: no descendant of a part outlives the part, a stop, or a killed supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from clawloop.app.local.supervision.supervisor import guarded
from tests.processes import alive

GRACE = timedelta(seconds=30)
# A parent with a child and, in a session of its own, a grandchild; each writes its pid.
FAMILY = """
import os, subprocess, sys, time
folder = sys.argv[1]
grandchild = (
    "import os, time, pathlib; os.setsid();"
    f"pathlib.Path({folder!r}, 'grandchild').write_text(str(os.getpid())); time.sleep(600)"
)
child = (
    "import os, pathlib, subprocess, sys, time;"
    f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]);"
    f"pathlib.Path({folder!r}, 'child').write_text(str(os.getpid())); time.sleep(600)"
)
subprocess.Popen([sys.executable, "-c", child])
open(os.path.join(folder, "parent"), "w").write(str(os.getpid()))
"""
STAYS = FAMILY + "time.sleep(600)"
IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STAYS
ENDS = FAMILY + "while not os.path.exists(os.path.join(folder, 'go')):\n    time.sleep(0.02)\nos.kill(os.getpid(), 9)"


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def family(folder: Path) -> list[psutil.Process]:
    names = ("parent", "child", "grandchild")
    until(lambda: all((folder / name).exists() and (folder / name).read_text() for name in names))
    return [psutil.Process(int((folder / name).read_text())) for name in names]


@pytest.fixture
def run_guarded(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(program: str, grace: timedelta = GRACE) -> subprocess.Popen[bytes]:
        command = guarded((sys.executable, "-c", program, str(tmp_path)), signal.SIGTERM, grace)
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_sigterm_to_the_guard_ends_all_descendants(
    run_guarded: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    guard = run_guarded(STAYS)
    members = family(tmp_path)
    guard.terminate()
    assert guard.wait(30) == -signal.SIGTERM
    assert alive(members) == []


def test_descendants_that_ignore_sigterm_are_killed_after_the_grace_period(
    run_guarded: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    guard = run_guarded(IGNORES, grace=timedelta(seconds=0.5))
    members = family(tmp_path)
    terminated_at = time.monotonic()
    guard.terminate()
    assert guard.wait(30) == -signal.SIGKILL
    assert time.monotonic() - terminated_at >= 0.5
    assert alive(members) == []


def test_a_second_sigterm_skips_the_grace_period(
    run_guarded: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    guard = run_guarded(IGNORES, grace=timedelta(minutes=5))
    members = family(tmp_path)
    guard.terminate()
    deadline = time.monotonic() + 30
    while guard.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.3)
        guard.terminate()  # repeated: on a busy machine two signals may arrive as one
    assert guard.wait(30) == -signal.SIGKILL
    assert alive(members) == []


def test_descendants_of_a_killed_part_are_ended(
    run_guarded: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    guard = run_guarded(ENDS)
    members = family(tmp_path)
    (tmp_path / "go").touch()
    assert guard.wait(30) == -signal.SIGKILL
    assert alive(members) == []


@pytest.mark.parametrize("code", [0, 3, 255])
def test_the_guard_exits_with_the_parts_code(run_guarded: Callable[..., subprocess.Popen[bytes]], code: int) -> None:
    assert run_guarded(f"raise SystemExit({code})").wait(30) == code


def test_a_program_that_cannot_be_run_is_reported() -> None:
    command = guarded(("/nowhere/program",), signal.SIGTERM, GRACE)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 127
    assert ended.stderr == "cannot run /nowhere/program: No such file or directory\n"


def test_killing_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    starter = f"""
import asyncio, signal, sys
from datetime import timedelta
from pathlib import Path
from clawloop.app.local.supervision.supervisor import Launch, Part
from clawloop.app.local.supervision.supervisor import Supervisor

async def main():
    async def ready():
        return True
    launch = Launch((sys.executable, "-c", {STAYS!r}, {str(tmp_path)!r}), {{}})
    supervisor = Supervisor(Path({str(tmp_path)!r}, "logs"), lambda status: None)
    supervisor.start(Part("family", "", lambda: launch, ready, stop_within=timedelta(seconds=2)))
    await asyncio.sleep(600)

asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", starter], env=dict(os.environ))
    members = family(tmp_path)
    guards = psutil.Process(parent.pid).children()
    assert guards
    parent.kill()
    parent.wait()
    until(lambda: not alive([*members, *guards]), seconds=30)
