"""Folders of killed processes are found at whatever moment they were killed; those of living ones stay."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clawloop.sandboxes.folders import abandoned_folders, owned_folder

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
