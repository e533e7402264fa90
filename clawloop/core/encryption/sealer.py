"""Encrypts content, bound to the place where it is stored, by AES-256-GCM.

A sealed value is `version, key id, nonce, ciphertext and tag`. Its place is authenticated with it: a value that
is copied to another row or file does not open there. Lengths are not hidden: a sealed value is `OVERHEAD` bytes
longer.
"""

from __future__ import annotations

import logging
import secrets
import time
from hashlib import blake2b
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from clawloop.core.encryption.key_file import KEY_ID_BYTES, SETTING, Keys, key_id, read_keys
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, SetupError

log = logging.getLogger(__name__)

_VERSION = b"\x01"
_NONCE_BYTES = 12
_TAG_BYTES = 16
HEAD_BYTES = len(_VERSION) + KEY_ID_BYTES
"""Equal for all values that one key has sealed; 6, so that base64 of it is 8 characters whatever follows."""

OVERHEAD = HEAD_BYTES + _NONCE_BYTES + _TAG_BYTES
"""34: not a multiple of 4, by which sealed token ids are told from plain ones."""

LOOK_SECONDS = 1.0
"""Longest time after which a running process encrypts with a new first key."""

KEYED_BYTES = 33
"""Length of a keyed digest: of no plain one, by which they are told apart."""


class Sealer:
    """
    Args:
        path: the key file; it is read again when it was changed, and at once when a value has a key that it lacked, so
            that keys may be added and removed while everything runs.

    Raises:
        SetupError: as `read_keys`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looked_at = time.monotonic()
        self._read_at = _changed_at(path)
        self._use(read_keys(path))

    @property
    def head(self) -> bytes:
        """First bytes of each value that is sealed now."""
        return self._first()[0]

    def seal(self, content: bytes, place: str) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        head, cipher = self._first()
        return head + nonce + cipher.encrypt(nonce, content, place.encode())

    def open(self, sealed: bytes, place: str) -> bytes:
        """
        Raises:
            EncryptionKeyMissing: no key of the file seals such values.
            ContentUnreadable: this one was changed, or moved from its place.
        """
        if not is_sealed(sealed):
            raise ContentUnreadable(f"{place} is damaged: it is neither plain nor encrypted")
        head, nonce = sealed[:HEAD_BYTES], sealed[HEAD_BYTES : HEAD_BYTES + _NONCE_BYTES]
        if head not in self._ciphers:
            self._read_again()
        cipher = self._ciphers.get(head)
        if cipher is None:
            number = head[len(_VERSION) :].hex()
            raise EncryptionKeyMissing(
                f"{place} is encrypted with key {number}, which the file of {SETTING} lacks: copy the newest file here"
            )
        try:
            return cipher.decrypt(nonce, sealed[HEAD_BYTES + _NONCE_BYTES :], place.encode())
        except (InvalidTag, ValueError):
            raise ContentUnreadable(
                f"{place} was changed after it was encrypted, or belongs to another place"
            ) from None

    def digest(self, plain: bytes) -> bytes:
        """A digest keyed by the key file's `digests` line, so that content cannot be guessed from its hash."""
        return blake2b(plain, key=self._digests, digest_size=KEYED_BYTES).digest()

    def _use(self, keys: Keys) -> None:
        self._digests = keys.digests
        self._ciphers = {_head_of(key): AESGCM(key) for key in keys.keys}  # the first key's first

    def _first(self) -> tuple[bytes, AESGCM]:
        """The file's first key; the file is read again if the last look is older than LOOK_SECONDS."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_SECONDS:
            self._looked_at = now
            self._read_again()
        return next(iter(self._ciphers.items()))

    def _read_again(self) -> None:
        changed_at = _changed_at(self._path)
        if not changed_at or changed_at == self._read_at:
            return
        try:
            keys = read_keys(self._path)
        except SetupError as error:  # the file is being edited; the old keys still serve
            log.warning("file of encryption keys not read again", extra={"why": str(error)})
            return
        self._read_at = changed_at
        if keys.digests == self._digests:
            self._use(keys)


def is_sealed(content: bytes) -> bool:
    """True if some key may have sealed this content."""
    return len(content) >= OVERHEAD and content.startswith(_VERSION)


def _changed_at(path: Path) -> int:
    """The file's time of change in nanoseconds; 0 if it cannot be read."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _head_of(key: bytes) -> bytes:
    return _VERSION + key_id(key)
