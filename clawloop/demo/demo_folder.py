"""The demo's data folder, and what the demo leaves in it so that others find the way to a demo that runs.

Knows nothing about what runs there. Whatever is in the folder belongs to the demo, so it takes no folder that is
not empty and not its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from clawloop.errors import SetupError
from clawloop.local.checks import lock_file, require_folder

_MARK = "demo.json"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a gateway is, and what opens it.

    Args:
        url: without `/v1`.
        key: to chat with; admin_key: to see what became of it, None if there is none.
    """

    url: str
    key: str
    admin_key: str | None


@contextmanager
def demo_folder(data: Path, *, keep: bool) -> Iterator[Path]:
    """`DATA/demo`, empty, for this demo alone; removed in the end unless it is kept.

    Raises:
        SetupError: another demo runs on it, it cannot be written to, or it holds what no demo made.
    """
    folder = data / "demo"
    with lock_file(data / "demo.lock", f"a demo already runs on {folder}"):
        _clear(folder)
        require_folder(folder)
        (folder / _MARK).touch()
        try:
            yield folder
        finally:
            if not keep:
                _clear(folder)


def write_address(folder: Path, address: Address) -> None:
    """Leave word of a running demo; only the owner can read it."""
    path = folder / _MARK
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(asdict(address) | {"process": os.getpid()}, indent=2) + "\n")


def read_address(data: Path) -> Address | None:
    """Where the demo on this data folder is; None if none runs there."""
    path = data / "demo" / _MARK
    try:
        known = json.loads(path.read_text(encoding="utf-8") or "{}")
        if not psutil.pid_exists(known["process"]):
            return None
        return Address(known["url"], known["key"], known["admin_key"])
    except (FileNotFoundError, NotADirectoryError, KeyError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise SetupError(f"{path} cannot be read: give --url and --key") from error


def _clear(folder: Path) -> None:
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / _MARK).is_file():
        raise SetupError(f"{folder} is no demo's folder, and a demo would empty it: choose another folder: --data")
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise SetupError(f"cannot empty {folder}: {error.strerror}; choose another folder: --data") from error
