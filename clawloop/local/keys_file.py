"""Reads and writes `keys.json`: the secrets of the keys that `clawloop up` creates.

The database stores only their hashes, so this file is where a person can look them up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from clawloop.errors import SetupError


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
    new_file = path.with_name(f"{path.name}.new")
    new_file.unlink(missing_ok=True)
    new_file.touch(mode=0o600, exist_ok=False)
    with new_file.open("w", encoding="utf-8") as file:
        json.dump(dict(keys), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    new_file.replace(path)
