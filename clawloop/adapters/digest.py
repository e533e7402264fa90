"""The hash of an adapter, over its three files.

Imports no torch, so that an engine's agent and `clawloop check` can use it cheaply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from clawloop.errors import AdapterUnreadable, AdapterUnusable

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
