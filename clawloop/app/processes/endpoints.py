"""Addresses of database and Temporal, and the engines' secret: from the settings, else as `clawloop up` left them.

Every verb imports this module, so it imports next to nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import UUID, uuid4

from pydantic import TypeAdapter, ValidationError

from clawloop.core.errors import SetupError
from clawloop.core.settings import Settings
from clawloop.operations.workflow_links import WorkflowLinks
from clawloop.serving.engine_secret import Secret, SecretFile, no_secret


def database_url(settings: Settings) -> str:
    """URL of the database: DATABASE_URL, else that of the last `clawloop up` on this data folder.

    Raises:
        SetupError: there is neither.
    """
    if settings.database_url is not None:
        return settings.database_url
    addresses = read_runtime_file(settings.data)
    if addresses is None:
        require_start(settings.data)
        raise SetupError(
            f"no database: set DATABASE_URL, or start `clawloop up --data {settings.data}` in another terminal"
        )
    return addresses.database_url


def require_start(data: Path) -> None:
    """
    Raises:
        SetupError: something begins on this data folder, and has not said where it answers.
    """
    if _runs(data) and read_runtime_file(data) is None:
        raise SetupError(f"`clawloop up` still starts on {data}: its terminal says `ready` once a chat is answered")


def temporal_address(settings: Settings) -> str | None:
    """Address of Temporal: TEMPORAL_ADDRESS, else that of the last `clawloop up` on this data folder, else None."""
    if settings.temporal_address is not None:
        return settings.temporal_address
    addresses = read_runtime_file(settings.data)
    return None if addresses is None else addresses.temporal_address


def required_temporal_address(settings: Settings) -> str:
    """Temporal's address, as from `temporal_address`.
    Raises:
        SetupError: no Temporal is configured.
    """
    address = temporal_address(settings)
    if address is None:
        raise SetupError("no Temporal: set TEMPORAL_ADDRESS, or start `clawloop up` in another terminal")
    return address


def gateway_url(settings: Settings) -> str:
    """URL of the gateways of the last `clawloop up` on this data folder, else the one at which `up` starts them."""
    addresses = read_runtime_file(settings.data)
    return (None if addresses is None else addresses.gateway) or "http://127.0.0.1:30000"


def workflow_links(settings: Settings) -> WorkflowLinks:
    """Links into Temporal's UI: CLAWLOOP_TEMPORAL_UI, else that of the last `clawloop up` on this data folder."""
    if settings.temporal_ui is not None:
        return WorkflowLinks(settings.temporal_ui)
    # A Temporal that the operator names is not the one whose UI the file has.
    addresses = read_runtime_file(settings.data) if settings.temporal_address is None else None
    return WorkflowLinks(None if addresses is None else addresses.temporal_ui)


def engine_secret(settings: Settings) -> Secret:
    """The secret for engines: CLAWLOOP_ENGINE_SECRET, else that of CLAWLOOP_ENGINE_SECRET_FILE, else that of `clawloop
    up`'s engines, else none.

    Raises:
        SetupError: the file that holds it cannot be read, or everybody may read it.
    """
    if settings.engine_secret is not None:
        given = settings.engine_secret.get_secret_value()
        return lambda: given
    path = settings.engine_secret_file or engine_secret_file(settings.data)
    if path != settings.engine_secret_file and not path.exists():
        return no_secret
    return SecretFile(path)


def engine_secret_file(data: Path) -> Path:
    """Path of the file in which `clawloop up` keeps the secrets of the engines that it starts."""
    return data / "engine-secret"


# The runtime file -----------------------------------------------------------------------------------------------------
# `running.json`: the addresses that the last `clawloop up` on a data folder used.
#
# It stays when `clawloop up` ends. It contains the database password, so only its owner can read it.


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
    """Write the addresses, and note the data folder among this user's, for commands without `--data`."""
    path = _path(data)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(asdict(addresses), indent=2) + "\n")
    note = _notes() / hashlib.sha256(bytes(data.resolve())).hexdigest()[:16]
    # A home that cannot be written to costs the convenience, not the start.
    with suppress(OSError):
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{data.resolve()}\n", encoding="utf-8")


def _path(data: Path) -> Path:
    return data / "running.json"


# Data folders on which a `clawloop up` or `clawloop demo run` of this user runs.

LOCK_NAME = "up.lock"


def chosen_data(settings: Settings, *, reads: bool) -> tuple[Path, bool]:
    """The data folder that a command without `--data` means, and whether the command should name it.

    It is the one of the settings, if something runs there, if the environment names it or a database, or if nothing
    runs at all; else the one where something runs. If several run, a command that reads means the newest.

    Args:
        reads: the command changes nothing.

    Raises:
        SetupError: several run, and the command writes; to erase in the wrong one would be worse than to ask.
    """
    if "data" in settings.model_fields_set or settings.database_url is not None:
        return settings.data, False
    running = running_data()
    if _runs(settings.data):
        return settings.data, len(running) > 1
    if len(running) > 1 and not reads:
        raise SetupError(f"several instances run; say which one: {', '.join(f'--data {one}' for one in running)}")
    return (running[0], True) if running else (settings.data, False)


def running_data() -> list[Path]:
    """Data folders of this user on which something runs, newest first; removes the notes of folders that are gone."""
    with suppress(OSError):
        notes = sorted(_notes().iterdir(), key=lambda note: note.stat().st_mtime, reverse=True)
        noted = {note: Path(note.read_text(encoding="utf-8").strip()) for note in notes}
        for note in [note for note, folder in noted.items() if _is_gone(folder)]:
            with suppress(OSError):
                note.unlink()
        return [folder for folder in noted.values() if _runs(folder)]
    return []


def _is_gone(folder: Path) -> bool:
    """True if there is no such folder; not of one that cannot be looked at."""
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _runs(data: Path) -> bool:
    """True while a process holds the folder's lock, see `clawloop.app.local.checks.lock_data_folder`."""
    try:
        with (data / LOCK_NAME).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _notes() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "clawloop" / "instances"
