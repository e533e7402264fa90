"""The file of encryption keys: the first key encrypts, all decrypt; a key of its own makes digests, and never changes.

One entry a line, `digests NAME` or `key NAME`, the name being the key in base64; what follows `#` is a comment. A file
rather than a variable: it can hold several keys, and neither `ps` nor a crash report shows it.
"""

from __future__ import annotations

import base64
import binascii
import os
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from clawloop.core.durable_files import create_private, locked_folder, replace_content, sync_folder
from clawloop.core.errors import SetupError

SETTING = "CLAWLOOP_ENCRYPTION_KEY_FILE"
KEY_ID_BYTES = 5
_KEY_BYTES = 32
_DIGESTS, _KEY = "digests", "key"
_TITLE = "# Clawloop's encryption keys. Without this file the conversations cannot be read: keep a copy elsewhere."


@dataclass(frozen=True, slots=True)
class Keys:
    """
    Args:
        digests: keys the digests by which conversations are found; the same for ever.
        keys: the first encrypts, all decrypt.
    """

    digests: bytes
    keys: tuple[bytes, ...]


def read_keys(path: Path) -> Keys:
    """
    Raises:
        SetupError: the file cannot be read, others may read it, or it is none; names the setting.
    """
    try:
        with path.open(encoding="ascii") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SetupError(f"{SETTING}: cannot read {path}: {why}; `clawloop encryption key` makes one") from None
    if mode & 0o007:
        raise SetupError(f"{SETTING}: everybody on this machine may read {path}: chmod 600 {path}")
    digests: list[bytes] = []
    keys: list[bytes] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (words := line.partition("#")[0].split()):
            continue
        if len(words) != 2 or words[0] not in (_DIGESTS, _KEY):
            raise SetupError(f"{SETTING}: line {number} of {path} is neither `{_KEY} …` nor `{_DIGESTS} …`")
        (digests if words[0] == _DIGESTS else keys).append(_decoded(words[1], path, number))
    if len(digests) != 1 or not keys:
        raise SetupError(
            f"{SETTING}: {path} has {len(keys)} keys and {len(digests)} lines `{_DIGESTS}`: it needs one, and a key"
        )
    return Keys(digests[0], tuple(keys))


def make_keys(path: Path) -> None:
    """Write a file with one new key.

    Raises:
        SetupError: there is a file already, or it cannot be written.
    """
    _write(path, [_TITLE, f"{_DIGESTS} {_new()}", _new_key()])


def add_key(path: Path) -> int:
    """Put a new key before the others, which stay; returns their number. The same users can read the file as before.

    Raises:
        SetupError: the file is none, or cannot be written.
    """
    path = path.resolve()  # a link stays one
    try:
        with locked_folder(path.parent):
            before = read_keys(path)
            lines = path.read_text(encoding="ascii").splitlines()
            first = next(n for n, line in enumerate(lines) if line.split()[:1] == [_KEY])
            replace_content(path, "\n".join([*lines[:first], _new_key(), *lines[first:]]) + "\n")
            return len(before.keys) + 1
    except OSError as error:
        raise SetupError(f"cannot write {path} for its owner: {error.strerror}") from None


def key_id(key: bytes) -> bytes:
    """Id of a key, written in each value that it encrypts, and in the comment of the key's line."""
    return blake2b(key, digest_size=KEY_ID_BYTES, person=b"clawloop-key-id").digest()


def _write(path: Path, lines: list[str]) -> None:
    try:
        create_private(path, "\n".join(lines) + "\n")
        sync_folder(path.parent)  # a key must outlive a power cut before it encrypts anything
    except FileExistsError:
        raise SetupError(f"{path} exists already: `clawloop encryption key --add` puts a new key into it") from None
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error.strerror}") from None


def _new() -> str:
    return base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()


def _new_key() -> str:
    key = _new()
    return f"{_KEY} {key}  # {key_id(base64.b64decode(key)).hex()}"


def _decoded(text: str, path: Path, number: int) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != _KEY_BYTES:
        raise SetupError(f"{SETTING}: line {number} of {path} has no key of {_KEY_BYTES} bytes in base64")
    return key
