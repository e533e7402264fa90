"""How processes end: what was asked for and written stays, Python's own shutdown is left out."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The shutdown of this interpreter is as deadly as that beside a thread that calls into it.
PROGRAM = """
import atexit, os, sys
from clawloop.processes.process_exit import run_and_exit
atexit.register(os.abort)
def run():
    print("done")
    {end}
run_and_exit(run)
"""


def ended(end: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [("pass", 0, ""), ("sys.exit()", 0, ""), ("sys.exit(3)", 3, ""), ("sys.exit('no')", 1, "no\n")],
)
def test_a_process_ends_with_the_code_it_asked_for_and_skips_pythons_shutdown(end: str, code: int, told: str) -> None:
    process = ended(end)
    assert (process.returncode, process.stdout, process.stderr) == (code, "done\n", told)


def test_what_nobody_caught_is_printed_with_its_traceback() -> None:
    process = ended("raise LookupError('lost')")
    assert "LookupError: lost" in process.stderr
    assert process.returncode != 0


@pytest.mark.parametrize(("end", "closed", "code"), [("pass", 1, 0), ("sys.exit('no')", 2, 1)])
def test_a_process_whose_output_is_closed_ends_as_it_asked(end: str, closed: int, code: int) -> None:
    asked = ["/bin/sh", "-c", f'exec "$0" -c "$1" {closed}>&-', sys.executable, PROGRAM.format(end=end)]
    process = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (code, "")
