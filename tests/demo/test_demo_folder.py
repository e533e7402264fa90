"""The demo's folder: locking, removal, and the address of a running demo."""

from __future__ import annotations

import os
import shutil
import stat
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from clawloop.app.demo.demo_folder import Address, demo_folder, read_address, write_address
from clawloop.app.demo.plan import plan
from clawloop.app.demo.run import DemoOptions, DemoSetup, run
from clawloop.app.demo.scoreboard import ScoreLines
from clawloop.app.local.parts import Deployment
from clawloop.core.errors import SetupError


def test_the_folder_starts_empty_and_is_removed(tmp_path: Path) -> None:
    with demo_folder(tmp_path, keep=False) as folder:
        (folder / "postgres").mkdir()
    assert not folder.exists()


def test_of_a_demo_that_fails_the_logs_stay_which_its_error_names_and_no_demo_minds_them(tmp_path: Path) -> None:
    folder = tmp_path / "demo"

    def fail() -> None:
        (folder / "models").mkdir()
        (folder / "keys.json").touch()
        (folder / "logs").mkdir()
        (folder / "logs" / "postgres.log").write_text("no space left")
        raise SetupError("postgres failed to start")

    with pytest.raises(SetupError, match="postgres failed to start"), demo_folder(tmp_path, keep=False):
        fail()
    assert {path.name for path in folder.iterdir()} == {"demo.json", "logs"}
    assert (folder / "logs" / "postgres.log").read_text() == "no space left"
    with demo_folder(tmp_path, keep=False):
        assert {path.name for path in folder.iterdir()} == {"demo.json"}
    assert not folder.exists()


def test_a_demo_that_fails_before_a_part_starts_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="in use"), demo_folder(tmp_path, keep=False):
        raise SetupError("port 1 is in use")
    assert not (tmp_path / "demo").exists()


def test_a_kept_folder_stays_until_the_next_demo(tmp_path: Path) -> None:
    with demo_folder(tmp_path, keep=True) as folder:
        (folder / "old").touch()
    assert (folder / "old").exists()
    with demo_folder(tmp_path, keep=False) as folder:
        assert not (folder / "old").exists()


def test_a_folder_that_no_demo_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "precious").touch()
    with pytest.raises(SetupError, match="was not made by a demo, and a demo would empty it"):
        with demo_folder(tmp_path, keep=False):
            pass
    assert (tmp_path / "demo" / "precious").exists()


def test_a_second_demo_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    with demo_folder(tmp_path, keep=False) as folder:
        (folder / "mine").touch()
        with pytest.raises(SetupError, match=rf"a demo already runs on .*demo \(process {os.getpid()}\): stop it"):
            with demo_folder(tmp_path, keep=False):
                pass
        assert (folder / "mine").exists()


def test_a_running_demo_is_found_and_one_that_has_ended_is_not(tmp_path: Path) -> None:
    address = Address("http://127.0.0.1:1", "cl-secret", None)
    with demo_folder(tmp_path, keep=True) as folder:
        assert read_address(tmp_path) is None
        write_address(folder, address)
        assert read_address(tmp_path) == address
        assert stat.S_IMODE((folder / "demo.json").stat().st_mode) == 0o600
        content = (folder / "demo.json").read_text()
        (folder / "demo.json").write_text(content.replace(str(os.getpid()), str(2**22 + 1)))
        assert read_address(tmp_path) is None
        (folder / "demo.json").write_text("{")
        with pytest.raises(SetupError, match="give --url and --key"):
            read_address(tmp_path)


async def test_a_full_disk_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5 * 2**20))
    options = DemoOptions(plan(None, None, "combined", 64, paced=True, batch=8), DemoSetup(tmp_path, tmp_path, {}))

    async def prepare(deployment: Deployment) -> dict[str, str]:
        raise AssertionError

    with pytest.raises(SetupError, match=r"1024 MiB of free disk are needed in .*demo, 5 MiB are free"):
        await run(options, ScoreLines(Console(file=StringIO())), prepare)
    assert not (tmp_path / "demo").exists()
