"""Where the last `clawloop up` put its parts: a file in its data folder, for the other commands.

Knows nothing about whether they still run. The file holds the database's password, so only its owner can read it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Running:
    database_url: str
    temporal_address: str


def read_running(data: Path) -> Running | None:
    """What was started on this data folder last, or None."""
    try:
        return Running(**json.loads(_path(data).read_text()))
    except FileNotFoundError:
        return None


def write_running(data: Path, running: Running) -> None:
    path = _path(data)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(json.dumps(asdict(running), indent=2) + "\n")


def _path(data: Path) -> Path:
    return data / "running.json"
