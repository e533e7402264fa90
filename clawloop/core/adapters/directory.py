"""The folder of all versions: their directories, and the hash of each over its three files."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from clawloop.core.contracts.serving import AdapterDirectory
from clawloop.core.errors import AdapterUnreadable, AdapterUnusable

# Hashes ---------------------------------------------------------------------------------------------------------------
# The hash of an adapter, over its three files.
#
# Imports no torch, so that an engine's agent and `clawloop check` can use it cheaply.

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
BASE_FILE = "base_model.json"
"""Clawloop's own: the base model the adapter was trained on. vLLM and PEFT ignore it."""

HASHED_FILES = (CONFIG_FILE, WEIGHTS_FILE, BASE_FILE)


def adapter_sha256(path: Path) -> str:
    """SHA-256, in hex, of the adapter in this directory: names, sizes and contents of its three files.

    Raises:
        AdapterUnusable: a file is missing.
        AdapterUnreadable
    """
    return files_sha256({name: read_adapter_file(path / name) for name in HASHED_FILES})


def check_version(path: Path, sha256: str) -> None:
    """Check that this directory holds the adapter with this hash.

    Raises:
        AdapterUnusable: it holds another adapter, or a part of one.
        AdapterUnreadable
    """
    if (actual := adapter_sha256(path)) != sha256:
        raise AdapterUnusable(f"{path} holds {actual[:12]}, expected {sha256[:12]}")


def files_sha256(files: Mapping[str, bytes]) -> str:
    """The hash of an adapter in memory: file name → content."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def read_adapter_file(path: Path) -> bytes:
    """The content of a file in a version's directory.

    Raises:
        AdapterUnusable: the file is missing, though the directory of its policy is there.
        AdapterUnreadable: the disk does not answer, or the directories are not there: it may not be mounted.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        unreadable = f"{path} cannot be read: {error.strerror}"
        if isinstance(error, FileNotFoundError) and _is_there(path.parent.parent):
            raise AdapterUnusable(unreadable) from error
        raise AdapterUnreadable(unreadable) from error


def _is_there(folder: Path) -> bool:
    try:
        return folder.is_dir()
    except OSError:
        return False


# The folder -----------------------------------------------------------------------------------------------------------
# The folder of all versions: lists and removes their directories.

# A complete version's directory, or one that `remove` renamed before deleting it.
_VERSION = re.compile(r"(?:\.removing-)?(?P<name>v(?P<n>[1-9][0-9]{0,8})-[0-9a-f]{12})")


class AdapterFolder:
    """The adapters folder of this machine.

    Args:
        path: the data folder's `adapters`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()

    async def are_here(self) -> bool:
        """True if the folder exists on this machine; if not, another machine has it."""
        return await asyncio.to_thread(self._path.is_dir)

    async def free_bytes(self) -> int:
        """Free bytes of the folder's disk."""
        return await asyncio.to_thread(lambda: shutil.disk_usage(self._path).free)

    async def directories(self) -> list[AdapterDirectory]:
        """Complete versions and those whose removal was interrupted, sorted by path."""
        return await asyncio.to_thread(self._directories)

    def _directories(self) -> list[AdapterDirectory]:
        directories = {
            AdapterDirectory(path.parent.name, int(name["n"]), f"{path.parent.name}/{name['name']}")
            for path in self._path.glob("*/*")
            if (name := _VERSION.fullmatch(path.name)) is not None and path.is_dir()
        }
        return sorted(directories, key=lambda directory: directory.path)

    async def remove(self, path: str) -> bool:
        """Deletes a version's directory. Idempotent.

        Args:
            path: as in `VersionRef`.

        Returns:
            False if the folder does not exist on this machine, so another machine has it.

        Raises:
            AdapterUnusable: the directory cannot be deleted, or is not in this folder.
        """
        return await asyncio.to_thread(self._remove, path)

    def _remove(self, relative: str) -> bool:
        if not self._path.is_dir():
            return False
        path = (self._path / relative).resolve()
        if not path.is_relative_to(self._path) or path.parent == self._path or path == self._path:
            raise AdapterUnusable(f"{relative} is not a version's directory")
        try:
            # Renamed first, so that a directory of this name is always complete.
            if path.is_dir():
                path.rename(path.with_name(f".removing-{path.name}"))
            for renamed in path.parent.glob(f".removing-{path.name}"):
                shutil.rmtree(renamed)
        except OSError as error:
            raise AdapterUnusable(f"{path} cannot be deleted: {error.strerror}") from error
        return True
