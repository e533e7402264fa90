"""Sandboxes that are ended before their command ends, by what watches their memory or from outside."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from clawloop.core.errors import SandboxFailed
from clawloop.sandboxes.answers import parse_answer
from clawloop.sandboxes.boxes import MIB, Limits
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders
from tests.sandboxes.test_bubblewrap import files_of, open_folder, processes_with, python, wait_until

__all__ = ["open_folder"]

HOLD_576_MIB = f"""
for _ in range(6):
    if os.fork() == 0:
        held = b'x' * {96 * MIB}
        time.sleep(600)
        os._exit(0)
time.sleep(600)
"""


@pytest.mark.slow
async def test_processes_that_have_too_much_memory_together_are_ended() -> None:
    """Each has less than its own limit; what was left is kept."""
    code = f"""
import os, time
open('left', 'w').write('x')
{HOLD_576_MIB}"""
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders())
    result = await python(sandboxes, code, limits=Limits(memory_bytes=512 * MIB))
    assert (result.exit_code, result.problem) == (-9, f"its processes had more than {512 * MIB} bytes of memory")
    assert files_of(result) == {"left": b"x"}


@pytest.mark.slow
async def test_a_command_that_stops_what_counts_its_memory_is_ended_from_outside(open_folder: Path) -> None:
    word = f"stopped-{uuid4().hex}"
    code = f"""
import os, signal, time  # {word}
os.kill(os.getppid(), signal.SIGSTOP)
{HOLD_576_MIB}"""
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders(open_folder))
    result = await python(sandboxes, code, seconds=600.0, limits=Limits(memory_bytes=400 * MIB))
    assert (result.exit_code, result.problem) == (None, f"its processes had more than {400 * MIB} bytes of memory")
    await asyncio.to_thread(wait_until, lambda: not processes_with(word))
    assert list(open_folder.iterdir()) == []


@pytest.mark.slow
async def test_a_sandbox_that_is_killed_from_outside_is_no_fault_of_the_command(open_folder: Path) -> None:
    sandboxes = await asyncio.to_thread(Bubblewrap.find, BoxFolders(open_folder))
    word = f"killed-{uuid4().hex}"
    running = asyncio.create_task(python(sandboxes, f"import time; time.sleep(600)  # {word}", seconds=600.0))
    while not await asyncio.to_thread(processes_with, word):
        await asyncio.sleep(0.05)
    [outer] = [child for child in psutil.Process().children() if str(open_folder) in " ".join(child.cmdline())]
    outer.kill()
    with pytest.raises(SandboxFailed, match="bubblewrap was ended by signal 9"):
        await running
    await asyncio.to_thread(wait_until, lambda: not processes_with(word))
    assert list(open_folder.iterdir()) == []


@pytest.mark.parametrize("said", ["see \x1b[2J my prompt", "what it left cannot be read: hello", ["it"], 1])
def test_words_that_are_not_the_sandboxs_own_stay_in_it(said: object) -> None:
    """Why nothing was left is shown to people, and crosses Temporal."""
    header = {"exit_code": 0, "output": 0, "artifact": 0, "problem": said}
    result = parse_answer(json.dumps(header).encode() + b"\n", b"", Limits())
    assert (result.exit_code, result.problem) == (0, "the sandbox's answer is not its own")
