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
