"""The secret that engines want: as it was given, or from a file that may change while a process runs.

The file has one secret a line. The first is sent; an engine's guard accepts all, so that a new one can be put before
the old.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Secret = Callable[[], str | None]
"""The secret to send now; None: none."""


def no_secret() -> None:
    """For engines that need none."""
    return


class SecretFile:
    """The first secret of a file, read again when the file was changed.

    Raises:
        OSError: the file cannot be read at first.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _state(path)
        self._first = _first(path)

    def __call__(self) -> str | None:
        try:
            if (seen := _state(self._path)) != self._seen:
                self._first, self._seen = _first(self._path), seen
        except OSError:  # somebody replaces it
            pass
        return self._first


def _state(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size


def _first(path: Path) -> str | None:
    return next(iter(path.read_text(encoding="utf-8").split()), None)
