"""Reads and writes the secrets that `clawloop up` creates: `keys.json`, and the secret of its engines.

The database stores only hashes of the keys, so `keys.json` is where a person can look them up.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from clawloop.app.processes.endpoints import engine_secret_file
from clawloop.core.durable_files import create_private, locked_folder, replace_content
from clawloop.core.errors import SetupError
from clawloop.serving.engine_secret import read_secrets


def read_keys(path: Path) -> dict[str, str]:
    """Secrets by scope; empty if the file does not exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read ({error}): correct it, or delete it to create new keys") from error
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise SetupError(f"{path} is not a JSON object of keys by scope: correct it, or delete it to create new keys")
    return content


def write_keys(path: Path, keys: Mapping[str, str]) -> None:
    """Replace the file atomically; only its owner can read it."""
    _write_private(path, f"{json.dumps(dict(keys), indent=2)}\n")


def ensure_engine_secret(data: Path) -> Path:
    """The file with the secrets of the engines that `clawloop up` starts on this folder, made once."""
    path = engine_secret_file(data)
    if not path.exists():
        _write_private(path, f"{secrets.token_urlsafe(32)}\n")
    return path


def renew_engine_secret(path: Path, *, finish: bool) -> int:
    """Put a new secret before the others, or remove all but the first; returns their number. The same users can
    read the file as before.

    Raises:
        SetupError: the file cannot be read or written, everybody may read it, or it holds none.
    """
    path = path.resolve()  # a link stays one
    try:
        with locked_folder(path.parent):
            before = read_secrets(path)
            if not before:
                raise SetupError(f"{path} holds no secret: put the engines' secrets into it, one a line")
            now = before[:1] if finish else [secrets.token_urlsafe(32), *before]
            replace_content(path, "".join(f"{secret}\n" for secret in now))
    except OSError as error:
        raise SetupError(f"cannot change {path}: {error.strerror}") from error
    return len(now)


def _write_private(path: Path, content: str) -> None:
    new_file = path.with_name(f"{path.name}.new")
    new_file.unlink(missing_ok=True)
    create_private(new_file, content)
    new_file.replace(path)
