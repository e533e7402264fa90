"""Files that outlive a power cut."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make what was created, renamed or removed directly in the folder durable; a file's own sync does not do it.

    Raises:
        OSError: the folder cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold a folder's lock: of two processes that change a file in it, neither must lose the other's change.

    Raises:
        OSError: the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def create_private(path: Path, content: str) -> None:
    """Create a file that its owner alone can read. Its name outlives a power cut after `sync_folder`.

    Raises:
        FileExistsError
        OSError: it cannot be written.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_content(path: Path, content: str) -> None:
    """Replace a file's content atomically. The same users can read it as before.

    Raises:
        OSError: the file is not there, or cannot be written for its owner; then it is as before.
    """
    owned = path.stat()
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        create_private(partial, content)
        os.chown(partial, owned.st_uid, owned.st_gid)
        partial.chmod(owned.st_mode & 0o777)
        partial.replace(path)
        sync_folder(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
