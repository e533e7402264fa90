"""The files that an episode's agent changed, from tar archives of what it found and what it left."""

from __future__ import annotations

import asyncio
import difflib
import io
import posixpath
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from clawloop.core.contracts.episodes import EpisodeView
from clawloop.core.errors import ContentUnreadable, EpisodeUnusable, NotFound

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


async def changes_in(
    episode: EpisodeView,
    load: Callable[[str], Awaitable[bytes]],
    found_by_agent: Callable[[str, str], bytes | None],
) -> FileChanges | None:
    """The files that the episode's agent changed; None if nothing of it was kept.

    Args:
        load: reads an artifact by its digest.
        found_by_agent: the archive that a task's agent began with, by the names of environment and task; None: not
            known.

    Raises:
        NotFound: what the agent left cannot be read here; the message says why.
    """
    if episode.artifact_sha256 is None:
        return None
    try:
        left = await load(episode.artifact_sha256)
        found = found_by_agent(episode.environment, episode.task)
        return await asyncio.to_thread(changes_of, found, left)
    except ContentUnreadable as error:
        raise NotFound(f"{error}.", code="not_found", field="episode") from error
    except EpisodeUnusable as error:
        message = (
            "What the agent left is not here any more: it was erased, deleted by its age, or is on another machine."
        )
        raise NotFound(message, code="not_found", field="episode") from error
    except tarfile.TarError as error:
        raise NotFound("What the agent left is no archive.", code="not_found", field="episode") from error


def changes_of(found: bytes | None, left: bytes) -> FileChanges:
    """
    Args:
        found: what was in the agent's folder at the beginning; None: not known.

    Raises:
        tarfile.TarError: one of them is no archive.
    """
    before, after = {} if found is None else files_in(found), files_in(left)
    paths = [path for path in sorted(before.keys() | after.keys()) if before.get(path) != after.get(path)]
    shown = [_change(path, before, after) for path in paths[:MOST_FILES]]
    return FileChanges(shown, len(paths) - len(shown), found is not None)


def files_in(archive: bytes) -> dict[str, bytes]:
    """The regular files of a tar archive that is not compressed, by path."""
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
