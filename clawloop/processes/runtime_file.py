"""Where the last `clawloop up` put its parts: a file in its data folder, for the other commands.

Knows nothing about whether they still run. The file holds the database's password, so only its owner can read it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from clawloop.errors import SetupError


@dataclass(frozen=True, slots=True)
class Running:
    database_url: str
    temporal_address: str


def read_running(data: Path) -> Running | None:
    """What was started on this data folder last, or None.

    Raises:
        SetupError: the file is damaged.
    """
    path = _path(data)
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        addresses = known["database_url"], known["temporal_address"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError):
        addresses = None, None
    if not all(isinstance(address, str) for address in addresses):
        raise SetupError(f"{path} is damaged: delete it and start `clawloop up` again, or set DATABASE_URL")
    return Running(*addresses)


def installation(data: Path) -> str:
    """This data folder's own id, made once: by it one tells what this installation has added to a shared database.

    Raises:
        SetupError: the folder cannot be written to.
    """
    path = data / "installation"
    try:
        data.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), path.open("x") as file:
            file.write(f"{uuid4()}\n")
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise SetupError(f"cannot write to {data}: {error.strerror}; choose another folder: --data") from error


def write_running(data: Path, running: Running) -> None:
    path = _path(data)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(asdict(running), indent=2) + "\n")


def _path(data: Path) -> Path:
    return data / "running.json"
