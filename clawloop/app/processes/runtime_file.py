"""The runtime file `running.json`: the addresses that the last `clawloop up` on a data folder used.

It stays when `clawloop up` ends. It contains the database password, so only its owner can read it.
"""

from __future__ import annotations

import fcntl
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import UUID, uuid4

from pydantic import TypeAdapter, ValidationError

from clawloop.core.errors import SetupError


@dataclass(frozen=True, slots=True)
class RuntimeAddresses:
    """
    Args:
        temporal_ui: None if Temporal is the operator's own.
        gateway: the URL of the gateways; None if not known.
        context_tokens: the longest context of the engines; None if they are the operator's own.
    """

    database_url: str
    temporal_address: str
    temporal_ui: str | None
    gateway: str | None
    context_tokens: int | None


_ADDRESSES = TypeAdapter(RuntimeAddresses)


def read_runtime_file(data: Path) -> RuntimeAddresses | None:
    """The addresses of the last `clawloop up` on this data folder; None if there was none.

    Raises:
        SetupError: the file is damaged.
    """
    path = _path(data)
    try:
        return _ADDRESSES.validate_json(path.read_bytes(), strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError:  # its text would show the password
        raise SetupError(f"{path} is damaged: delete it and start `clawloop up` again, or set DATABASE_URL") from None


def installation_id(data: Path) -> str:
    """The data folder's id, created once: it marks the engines this installation adds to a shared database.

    Raises:
        SetupError: the folder cannot be written to.
    """
    path = data / "installation"
    try:
        data.mkdir(parents=True, exist_ok=True)
        # Also where another user alone may write. What is not whole is read again under the lock.
        with suppress(FileNotFoundError, ValueError):
            return str(UUID(path.read_text(encoding="utf-8").strip()))
        with path.open("a+", encoding="utf-8") as file:
            # Gateways begin at the same time; and an id could not be written while the disk was full.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if not (known := file.read().strip()):
                known = str(uuid4())
                file.write(f"{known}\n")
        return known
    except OSError as error:
        raise SetupError(f"cannot write to {data}: {error.strerror}; choose another folder: --data") from error


def write_runtime_file(data: Path, addresses: RuntimeAddresses) -> None:
    path = _path(data)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(asdict(addresses), indent=2) + "\n")


def _path(data: Path) -> Path:
    return data / "running.json"
