"""Files and folders of sandboxes: kept, handed on, found after a kill."""

from __future__ import annotations

import fcntl
import io
import os
import socket
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawloop.core.errors import SetupError
from clawloop.core.ids import new_episode_id
from clawloop.sandboxes.boxes import Limits, Sandboxes
from clawloop.sandboxes.bubblewrap import Bubblewrap
from clawloop.sandboxes.folders import BoxFolders, abandoned_folders, owned_folder
from clawloop.sandboxes.inside import pack
from clawloop.sandboxes.relay import relaying
from tests.sandboxes.test_bubblewrap import files_of, folders, open_folder, python, sandboxes

__all__ = ["folders", "open_folder", "sandboxes"]


# How long the path of the folder for temporary files may be.

_LONGEST = 31


async def test_the_longest_path_that_is_taken_has_room_for_an_episodes_socket(open_folder: Path) -> None:
    longest = open_folder / ("x" * (_LONGEST - 1 - len(os.fsencode(open_folder))))
    longest.mkdir()
    folders = BoxFolders(longest)
    folders.check_path()
    with folders.new(str(new_episode_id())) as box:
        async with relaying(box.gateway, "127.0.0.1", 1):
            assert len(os.fsencode(box.gateway)) == 107


def test_a_longer_path_is_refused_at_start_in_one_line(open_folder: Path) -> None:
    longer = open_folder / ("x" * (_LONGEST - len(os.fsencode(open_folder))))
    longer.mkdir()
    with pytest.raises(SetupError) as raised:
        Bubblewrap.find(BoxFolders(longer))
    assert str(raised.value) == (
        "sandboxes have sockets in the folder for temporary files, whose path may have 31 characters, and"
        f" {longer} has 32: set TMPDIR to a shorter one"
    )
    assert list(longer.iterdir()) == []


# Which files sandboxes keep of what a command left, and how they reach the next sandbox.


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


# Folders of killed processes are found at whatever moment they were killed; those of living ones stay.

_PREFIX = "test-"
_REMOVING = ("unlink", "rmdir")


class Killed(BaseException):
    pass


def sweep(root: Path) -> list[Path]:
    return list(abandoned_folders(root, _PREFIX))


def make_old(folder: Path) -> None:
    then = time.time() - 3600
    os.utime(folder, (then, then))


def fill(folder: Path) -> None:
    (folder / "box" / "inner").mkdir(parents=True)
    for name in ("a", "box/config.json", "box/inner/file", "z"):
        (folder / name).write_text("secret")
    (folder / "link").symlink_to("box")


def kill_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let the process be as one that is killed before it removes its nth file or folder."""
    calls = 0

    def killing(name: str) -> Callable[..., None]:
        remove = getattr(os, name)

        def removing(*words: Any, **options: Any) -> None:
            nonlocal calls
            calls += 1
            if calls > call:
                raise Killed
            remove(*words, **options)

        return removing

    for name in _REMOVING:
        monkeypatch.setattr(os, name, killing(name))


# Four files, a link, three folders and the lock.
@pytest.mark.parametrize("call", range(9))
def test_whoever_is_killed_while_it_removes_a_folder_leaves_one_that_is_found(tmp_path: Path, call: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, call)
        with pytest.raises(Killed), owned_folder(tmp_path, _PREFIX) as folder:
            fill(folder)
    left = [path.name for path in folder.iterdir()]
    assert ("lock" in left) == (call < 8)
    if left:
        assert sweep(tmp_path) == [folder]
    else:
        assert sweep(tmp_path) == []
        assert folder.exists()
        make_old(folder)
        assert sweep(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_lost_its_lock_is_removed_once_it_is_old(tmp_path: Path) -> None:
    """As one that was killed while it made the folder leaves."""
    folder = tmp_path / f"{_PREFIX}x"
    folder.mkdir()
    fill(folder)
    assert sweep(tmp_path) == []
    assert (folder / "box" / "config.json").exists()
    make_old(folder)
    assert sweep(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_an_old_folder_of_a_living_process_stays(tmp_path: Path) -> None:
    with owned_folder(tmp_path, _PREFIX) as folder:
        make_old(folder)
        assert sweep(tmp_path) == []
        assert folder.exists()


def test_a_sweep_that_comes_before_the_lock_leaves_the_process_with_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, swept = fcntl.flock, list[Path]()

    def sweeping(descriptor: int, operation: int) -> None:
        if not swept:
            monkeypatch.setattr(fcntl, "flock", lock)
            swept.extend(sweep(tmp_path))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", sweeping)
    with owned_folder(tmp_path, _PREFIX) as folder:
        assert len(swept) == 1
        assert list(tmp_path.iterdir()) == [folder]
        assert sweep(tmp_path) == []
        assert (folder / "lock").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_comes_before_the_locks_file_leaves_the_process_with_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Callable[..., str] = tempfile.mkdtemp

    def swept_at_once(**options: Any) -> str:
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        folder: str = make(**options)
        make_old(Path(folder))
        assert sweep(tmp_path) == []
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", swept_at_once)
    with owned_folder(tmp_path, _PREFIX) as folder:
        assert (folder / "lock").exists()


def test_two_sweeps_find_a_folder_once(tmp_path: Path) -> None:
    folder = tmp_path / f"{_PREFIX}x"
    folder.mkdir()
    (folder / "lock").touch()
    for found in abandoned_folders(tmp_path, _PREFIX):
        assert found == folder
        assert sweep(tmp_path) == []
        assert folder.exists()
    assert not folder.exists()


def test_what_cannot_be_removed_is_tried_again_by_the_next_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = os.unlink

    def refusing(path: Any, **options: Any) -> None:
        if Path(path).name == "config.json":
            raise PermissionError
        remove(path, **options)

    with owned_folder(tmp_path, _PREFIX) as folder:
        fill(folder)
        monkeypatch.setattr(os, "unlink", refusing)
    assert (folder / "box" / "config.json").exists()
    monkeypatch.undo()
    assert sweep(tmp_path) == [folder]
    assert list(tmp_path.iterdir()) == []
