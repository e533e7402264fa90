"""How processes end: with their exit code and output, skipping Python's own shutdown."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Shutting this interpreter down aborts, as it may beside a thread that calls into it.
PROGRAM = """
import atexit, os, sys
from clawloop.app.processes.process_exit import run_and_exit
atexit.register(os.abort)
def run():
    print("done")
    {end}
run_and_exit(run)
"""


def run_until(end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("end", "code", "stderr"),
    [("pass", 0, ""), ("sys.exit()", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "no\n")],
)
def test_a_process_ends_with_its_exit_code_and_skips_pythons_shutdown(end: str, code: int, stderr: str) -> None:
    process = run_until(end)
    assert (process.returncode, process.stdout, process.stderr) == (code, "done\n", stderr)


def test_an_uncaught_exception_is_printed_with_its_traceback() -> None:
    process = run_until("raise LookupError('lost')")
    assert "LookupError: lost" in process.stderr
    assert process.returncode != 0


@pytest.mark.parametrize(("end", "closed", "code"), [("pass", 1, 0), ("sys.exit('no')", 2, 1)])
def test_a_process_whose_output_is_closed_ends_with_its_exit_code(end: str, closed: int, code: int) -> None:
    command = ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}>&-', sys.executable, PROGRAM.format(end=end)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (code, "")
