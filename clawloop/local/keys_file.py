"""The secrets of the keys that `clawloop up` makes, so that a person can look them up again.

Knows nothing about the keys themselves: the database holds only their hashes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from clawloop.errors import SetupError


def read_keys(path: Path) -> dict[str, str]:
    """Secrets by scope; empty if there is no file yet."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read ({error}): mend it, or delete it to have new keys made") from error
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise SetupError(f"{path} is not a list of keys by scope: mend it, or delete it to have new keys made")
    return content


def write_keys(path: Path, keys: Mapping[str, str]) -> None:
    """Write all secrets, readable by the owner alone, whole or not at all."""
    torn = path.with_name(f"{path.name}.new")
    torn.unlink(missing_ok=True)
    torn.touch(mode=0o600, exist_ok=False)
    with torn.open("w", encoding="utf-8") as file:
        json.dump(dict(keys), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    torn.replace(path)
