"""The demo's data folder, and the file in it with the address of a running demo.

The demo empties the folder, so it refuses a folder with content that no demo made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from clawloop.app.local.checks import lock_file, require_folder
from clawloop.core.errors import SetupError

_ADDRESS_FILE = "demo.json"
_LOGS = "logs"
# The logs that a part's error refers to, and the file by which the next demo recognises the folder.
_LEFT_BY_FAILURES = (_LOGS, _ADDRESS_FILE)


@dataclass(frozen=True, slots=True)
class Address:
    """The URL and keys of a gateway.

    Args:
        url: without `/v1`.
        key: for chats; admin_key: for the admin API, None if there is none.
    """

    url: str
    key: str
    admin_key: str | None


@contextmanager
def demo_folder(data: Path, *, keep: bool) -> Iterator[Path]:
    """Lock and empty `DATA/demo`, and remove it at the end unless `keep`; if it ends in an error, its logs stay.

    Raises:
        SetupError: another demo uses the folder, it cannot be written to, or it has content that no demo made.
    """
    folder = data / "demo"
    with lock_file(data / "demo.lock", f"a demo already runs on {folder}"):
        _clear(folder)
        require_folder(folder)
        (folder / _ADDRESS_FILE).touch()
        failed = False
        try:
            yield folder
        except SetupError:
            failed = True
            raise
        finally:
            if not keep:
                _clear(folder, but=_LEFT_BY_FAILURES if failed and (folder / _LOGS).is_dir() else ())


def write_address(folder: Path, address: Address) -> None:
    """Write the address of a running demo to a file that only its owner can read."""
    path = folder / _ADDRESS_FILE
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(asdict(address) | {"process": os.getpid()}, indent=2) + "\n")


def read_address(data: Path) -> Address | None:
    """Return the address of the demo that runs on this data folder; None if none runs.

    Raises:
        SetupError: the file cannot be read.
    """
    path = data / "demo" / _ADDRESS_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8") or "{}")
        if not psutil.pid_exists(content["process"]):
            return None
        return Address(content["url"], content["key"], content["admin_key"])
    except (FileNotFoundError, NotADirectoryError, KeyError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise SetupError(f"{path} cannot be read: give --url and --key") from error


def _clear(folder: Path, but: Collection[str] = ()) -> None:
    """Args: but: names in the folder that stay, and so does the folder; none: it is removed."""
    if not folder.exists():
        return
    if any(folder.iterdir()) and not (folder / _ADDRESS_FILE).is_file():
        raise SetupError(f"{folder} was not made by a demo, and a demo would empty it: choose another folder: --data")
    try:
        if not but:
            shutil.rmtree(folder)
            return
        for path in folder.iterdir():
            if path.name in but:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise SetupError(f"cannot empty {folder}: {error.strerror}; choose another folder: --data") from error
