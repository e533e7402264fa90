"""The runtime file `running.json`: the addresses that the last `clawloop up` on a data folder used.

It stays when `clawloop up` ends. It contains the database password, so only its owner can read it.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from clawloop.errors import SetupError


@dataclass(frozen=True, slots=True)
class RuntimeAddresses:
    """Args: temporal_ui: None if Temporal is the operator's own."""

    database_url: str
    temporal_address: str
    temporal_ui: str | None = None


def read_runtime_file(data: Path) -> RuntimeAddresses | None:
    """The addresses of the last `clawloop up` on this data folder; None if there was none.

    Raises:
        SetupError: the file is damaged.
    """
    path = _path(data)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        addresses = content["database_url"], content["temporal_address"]
        temporal_ui = content.get("temporal_ui")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SetupError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError):
        addresses, temporal_ui = (None, None), None
    if not all(isinstance(address, str) for address in addresses) or not isinstance(temporal_ui, str | None):
        raise SetupError(f"{path} is damaged: delete it and start `clawloop up` again, or set DATABASE_URL")
    return RuntimeAddresses(*addresses, temporal_ui)


def installation_id(data: Path) -> str:
    """The data folder's id, created once: it marks the engines this installation adds to a shared database.

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


def write_runtime_file(data: Path, addresses: RuntimeAddresses) -> None:
    path = _path(data)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(asdict(addresses), indent=2) + "\n")


def _path(data: Path) -> Path:
    return data / "running.json"
