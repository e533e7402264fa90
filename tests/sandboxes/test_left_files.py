"""Which files sandboxes keep of what a command left, and how they reach the next sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from clawloop.sandboxes.boxes import Sandboxes
from clawloop.sandboxes.inside import pack
from tests.sandboxes.test_bubblewrap import files_of, folders, python, sandboxes

__all__ = ["folders", "sandboxes"]


@pytest.mark.slow
async def test_a_file_with_two_names_is_kept_as_two_files(sandboxes: Sandboxes) -> None:
    code = "import os;os.mkdir('d');open('d/a','w').write('ab');os.link('d/a','b')"
    result = await python(sandboxes, code)
    assert (result.exit_code, result.problem) == (0, None)
    assert files_of(result) == {"b": b"ab", "d/a": b"ab"}


def test_each_name_of_a_file_counts_towards_what_may_be_left(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3000))
    os.link(tmp_path / "a", tmp_path / "b")
    assert pack(str(tmp_path), 7000) == (b"", "it left more than 7000 bytes")
    assert pack(str(tmp_path), 8500)[1] is None


@pytest.mark.slow
async def test_what_can_be_run_can_be_run_in_the_next_sandbox_and_sets_no_user(sandboxes: Sandboxes) -> None:
    code = """
import os
for name, mode in (('run', 0o755), ('set-user', 0o4711), ('text', 0o644)):
    open(name, 'w').write('#!/bin/sh\\necho ran\\n')
    os.chmod(name, mode)
"""
    first, again = [await python(sandboxes, code) for _ in range(2)]
    assert first.artifact == again.artifact
    code = """
import os, subprocess
print([oct(os.stat(f'/artifact/{name}').st_mode & 0o7777) for name in ('run', 'set-user', 'text')], flush=True)
subprocess.run(['/artifact/run'])
subprocess.run(['/task/inner/run'])
"""
    files = {"inner/run": b"#!/bin/sh\necho too\n"}
    second = await python(
        sandboxes, code, archive=first.artifact, unpack_to="/artifact", files=files, executable=["inner/run"]
    )
    assert second.output.decode() == "['0o755', '0o711', '0o644']\nran\ntoo\n"
