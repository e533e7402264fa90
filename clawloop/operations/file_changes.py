"""The files that an episode's agent changed, from tar archives of what it found and what it left."""

from __future__ import annotations

import difflib
import io
import posixpath
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

# A page shows some hundred lines; longer ones are for a program, from the archive itself.
MOST_FILES = 50
TEXT_CHARACTERS = 20_000


class Change(StrEnum):
    NEW = "new"
    CHANGED = "changed"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class FileChange:
    """
    Args:
        lines: of a unified diff; None: the file is no text, or too long.
    """

    path: str
    change: Change
    lines: Sequence[str] | None


@dataclass(frozen=True, slots=True)
class FileChanges:
    """
    Args:
        files: by path, `MOST_FILES` at most.
        more: number of further ones.
        compared: False: what the agent found is not known, and every file that it left is shown as new.
    """

    files: Sequence[FileChange]
    more: int
    compared: bool


def changes_of(found: bytes | None, left: bytes) -> FileChanges:
    """
    Args:
        found: what was in the agent's folder at the beginning; None: not known.

    Raises:
        tarfile.TarError: one of them is no archive.
    """
    before, after = {} if found is None else _files(found), _files(left)
    paths = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    shown = [_change(path, before, after) for path in paths[:MOST_FILES]]
    return FileChanges(shown, len(paths) - len(shown), found is not None)


def _files(archive: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as opened:
        for member in opened:
            if (content := opened.extractfile(member) if member.isreg() else None) is not None:
                files[posixpath.normpath(member.name)] = content.read()
    return files


def _change(path: str, before: Mapping[str, bytes], after: Mapping[str, bytes]) -> FileChange:
    change = Change.NEW if path not in before else Change.GONE if path not in after else Change.CHANGED
    old, new = _text(before.get(path, b"")), _text(after.get(path, b""))
    if old is None or new is None:
        return FileChange(path, change, None)
    # The first two lines name the files.
    return FileChange(path, change, list(difflib.unified_diff(old, new, lineterm=""))[2:])


def _text(content: bytes) -> list[str] | None:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return None
    return None if len(text) > TEXT_CHARACTERS or "\0" in text else text.splitlines()
