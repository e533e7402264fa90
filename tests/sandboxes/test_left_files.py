"""Which files sandboxes keep of what a command left, and how they reach the next sandbox."""

from __future__ import annotations

import io
import os
import socket
import tarfile
from pathlib import Path

import pytest

from clawloop.sandboxes.boxes import Limits, Sandboxes
from clawloop.sandboxes.inside import pack
from tests.sandboxes.test_bubblewrap import files_of, folders, python, sandboxes

__all__ = ["folders", "sandboxes"]


@pytest.mark.slow
async def test_a_file_with_two_names_is_kept_as_two_files(sandboxes: Sandboxes) -> None:
    code = "import os;os.mkdir('d');open('d/a','w').write('ab');os.link('d/a','b')"
    result = await python(sandboxes, code)
    assert (result.exit_code, result.problem) == (0, None)
    assert files_of(result) == {"b": b"ab", "d/a": b"ab"}


def names_in(packed: tuple[bytes, str | None]) -> list[str]:
    content, problem = packed
    assert problem is None
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.getnames()


def test_each_name_of_a_file_counts_towards_what_may_be_left(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(3000))
    os.link(tmp_path / "a", tmp_path / "b")
    assert pack(str(tmp_path), 7000) == (b"", "it left more than 7000 bytes")
    assert pack(str(tmp_path), 8500)[1] is None


def test_what_is_no_file_is_left_out_and_the_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "b-socket"))
    os.mkfifo(tmp_path / "c-pipe")
    (tmp_path / "d-link").symlink_to("nowhere")
    (tmp_path / "e").write_bytes(b"e")
    assert names_in(pack(str(tmp_path), 7000)) == ["a", "e"]


def test_a_file_that_vanishes_meanwhile_is_left_out_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_bytes(b"x")
    found = tarfile.TarFile.gettarinfo

    def vanishing(archive: tarfile.TarFile, path: str, name: str) -> tarfile.TarInfo:
        if name == "b":
            Path(path).unlink()
        info = found(archive, path, name)
        if name == "c":
            Path(path).unlink()
        return info

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", vanishing)
    assert names_in(pack(str(tmp_path), 7000)) == ["a", "d"]


def test_a_file_that_shrinks_meanwhile_is_kept_as_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"long")
    found = tarfile.TarFile.gettarinfo

    def shrinking(archive: tarfile.TarFile, path: str, name: str) -> tarfile.TarInfo:
        info = found(archive, path, name)
        Path(path).write_bytes(b"x")
        return info

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", shrinking)
    assert names_in(pack(str(tmp_path), 7000)) == ["a", "b"]


@pytest.mark.parametrize("characters", [5, 180])
def test_the_headers_of_long_names_count_towards_what_may_be_left(tmp_path: Path, characters: int) -> None:
    for number in range(100):
        (tmp_path / f"{number:03}{'x' * (characters - 3)}").write_bytes(b"x")
    packed, problem = pack(str(tmp_path), 1_000_000)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert len(archive.getmembers()) == 100
    assert problem is None
    too_little = len(packed) - 2 * tarfile.RECORDSIZE  # an archive's end is not counted, and fills up a record
    assert pack(str(tmp_path), too_little) == (b"", f"it left more than {too_little} bytes")


@pytest.mark.slow
async def test_what_is_no_file_or_was_made_secret_loses_no_other_work(sandboxes: Sandboxes) -> None:
    code = """
import os, socket
for name in ('a', 'secret', 'z'):
    open(name, 'w').write(name)
os.chmod('secret', 0)
socket.socket(socket.AF_UNIX).bind('socket')
os.mkfifo('pipe')
os.mkdir('hidden')
open('hidden/file', 'w').write('too')
os.chmod('hidden', 0)
"""
    result = await python(sandboxes, code)
    assert (result.exit_code, result.problem) == (0, None)
    assert files_of(result) == {"a": b"a", "secret": b"secret", "z": b"z", "hidden/file": b"too"}


@pytest.mark.slow
async def test_files_in_many_folders_in_each_other_are_kept_and_unpacked(sandboxes: Sandboxes) -> None:
    code = """
import os
open('top', 'w').write('left')
for depth in range(2500):
    os.mkdir('d')
    os.chdir('d')
    if depth in (1499, 2400):
        open('deep', 'w').write('left')
"""
    first = await python(sandboxes, code)
    assert (first.exit_code, first.problem) == (0, None)
    assert files_of(first) == {"top": b"left", f"{'d/' * 1500}deep": b"left"}  # no path can name the other
    code = f"print(open('/artifact/{'d/' * 1500}deep').read())"
    second = await python(sandboxes, code, archive=first.artifact, unpack_to="/artifact")
    assert second.output == b"left\n"


@pytest.mark.slow
async def test_many_files_with_long_names_are_too_much_and_the_answer_is_whole(sandboxes: Sandboxes) -> None:
    code = """
import os
os.mkdir('d' * 100)
for number in range(5000):
    open(f"{'d' * 100}/{number}", 'w').write('x')
"""
    result = await python(sandboxes, code)
    assert (result.exit_code, result.problem) == (0, f"it left more than {Limits().artifact_bytes} bytes")


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
