"""A data folder's permissions."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

from clawloop.app.local.private_folder import keep_private
from clawloop.core.adapters.directory import HASHED_FILES
from clawloop.training.adapters.files import write_version

FILES = dict.fromkeys(HASHED_FILES, b"x")


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_what_holds_conversations_is_closed_and_adapters_stay_readable(tmp_path: Path) -> None:
    for name in ("logs", "spool/rejected", "temporal", "adapters/default"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
        (folder / "file").chmod(0o644)
    (tmp_path / "spool" / "link").symlink_to("/etc/passwd")
    for folder_path, _, _ in os.walk(tmp_path):
        Path(folder_path).chmod(0o755)
    assert keep_private(tmp_path) == 8
    assert {_mode(tmp_path / name) for name in ("", "logs", "spool", "spool/rejected", "temporal")} == {0o700}
    assert {_mode(tmp_path / name / "file") for name in ("logs", "spool/rejected", "temporal")} == {0o600}
    assert _mode(tmp_path / "adapters/default/file") == 0o644
    assert _mode(Path("/etc/passwd")) == 0o644
    assert keep_private(tmp_path) == 0


def test_a_version_is_readable_below_a_closed_folder(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        written = write_version(tmp_path / "adapters" / "default", 1, FILES)
    finally:
        os.umask(before)
    for path in (tmp_path / "adapters", tmp_path / "adapters" / "default", written.path):
        assert _mode(path) == 0o755
    assert {_mode(path) for path in written.path.iterdir()} == {0o644}


def test_every_command_keeps_what_it_makes_for_its_own_user() -> None:
    """Commands that start no `up` write spools, exports and logs, too."""
    program = """
        import os
        from clawloop.app.cli import main
        os.umask(0o022)
        main.run_and_exit = lambda verb: print(f"{os.umask(0):o}")
        main.main()
    """
    ended = subprocess.run(
        [sys.executable, "-c", inspect.cleandoc(program)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "77\n"
