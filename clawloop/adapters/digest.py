"""The hash of an adapter, over its three files.

Imports no torch, so that an engine's agent and `clawloop check` can use it cheaply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from clawloop.errors import AdapterUnusable

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
BASE_FILE = "base_model.json"
"""Clawloop's own: the base model the adapter was trained on. vLLM and PEFT ignore it."""

HASHED_FILES = (CONFIG_FILE, WEIGHTS_FILE, BASE_FILE)


def adapter_sha256(path: Path) -> str:
    """SHA-256, in hex, of the adapter in this directory: names, sizes and contents of its three files.

    Raises:
        AdapterUnusable: a file cannot be read.
    """
    return files_sha256({name: read_adapter_file(path / name) for name in HASHED_FILES})


def check_version(path: Path, sha256: str) -> None:
    """Raise AdapterUnusable unless this directory holds the adapter with this hash."""
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
    """The file's content.

    Raises:
        AdapterUnusable: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterUnusable(f"{path} cannot be read: {error.strerror}") from error
