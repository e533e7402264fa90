"""vLLM finds the plugin by which its processes sleep while they wait for each other."""

from __future__ import annotations

import subprocess
import sys

import pytest

# As vLLM's engine and worker processes do when they start.
PROGRAM = """
import os
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.device_communicators import shm_broadcast
def refused():
    raise SystemExit("it yields")
os.sched_yield = refused
shm_broadcast.sched_yield()
print("it sleeps")
"""


@pytest.mark.slow
def test_an_engine_on_a_cpu_does_not_yield_in_a_loop() -> None:
    # As in an installation: the entry point is found by the distribution's metadata.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["it sleeps"], done.stderr
