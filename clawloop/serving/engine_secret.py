"""The secret that engines want: as it was given, or from a file that may change while a process runs.

The file has one secret a line. The first is sent; an engine's guard accepts all, so that a new one can be put before
the old.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from clawloop.core.errors import SetupError
from clawloop.core.telemetry.logs import never_log

Secret = Callable[[], str | None]
"""The secret to send now; None: none."""

log = logging.getLogger(__name__)


def no_secret() -> None:
    """No secret, for engines that need none."""
    return


class SecretFile:
    """The first secret of a file, read again when the file was changed. No log has any secret of it.

    Raises:
        SetupError: the file cannot be read at first, is no text, or everybody on the machine may read it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._seen = _state(path)
        except OSError as error:
            raise SetupError(f"cannot read {path}: {error.strerror}") from None
        self._first = _first(path)

    def __call__(self) -> str | None:
        try:
            seen = _state(self._path)
        except OSError:  # the file is being replaced
            return self._first
        if seen != self._seen:
            self._seen = seen
            try:
                self._first = _first(self._path)
            except SetupError as error:
                log.error("secret of engines not changed", extra={"why": str(error)})
        return self._first


def read_secrets(path: Path) -> list[str]:
    """The secrets of a file.

    Raises:
        SetupError: it cannot be read, is no text, or everybody on the machine may read it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            mode, secrets = os.fstat(file.fileno()).st_mode, file.read().split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise SetupError(f"cannot read {path}: {why}") from None
    never_log(secrets)
    if mode & 0o004:
        raise SetupError(f"everybody on this machine may read the secrets of {path}: chmod 600 {path}")
    return secrets


def _state(path: Path) -> tuple[int, int, int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode


def _first(path: Path) -> str | None:
    return next(iter(read_secrets(path)), None)
