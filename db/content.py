"""Writes and reads the columns that hold what conversations hold: as they are, or encrypted.

The one place of the database's side that knows of encryption. A sealed value and a plain one may stand side by side in
a column, and each says itself which it is: sealed JSON is a JSON string, where plain content is an object or a list;
sealed text begins with a mark; sealed bytes have a length that is no multiple of 4. What says nothing (an empty list,
text or array, and what an erasure leaves) stays as it is.

A digest of content is found by its stored form: keyed while content is encrypted. Plain digests of rows from
before the encryption stay findable until `clawloop encryption rotate` has keyed them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncConnection

from clawloop.encryption.key_file import SETTING
from clawloop.encryption.sealer import HEAD_BYTES, KEYED_BYTES, OVERHEAD, Sealer
from clawloop.errors import ContentUnreadable, EncryptionKeyMissing

MARK = "\x1asealed:"
"""Begins sealed text. No person types this control character; a text that begins so nevertheless is marked as plain."""

_PLAIN_MARK = f"{MARK}:"  # no base64 holds a colon
_WORDLESS_TEXTS = ("erased",)
_WORDLESS_JSON = ("[]", "{}")

SEALED_REST = OVERHEAD % 4
"""Remainder of the length of sealed bytes, divided by 4."""

Text = TypeVar("Text", str, str | None)
Bytes = TypeVar("Bytes", bytes, bytes | None)
Digest = TypeVar("Digest", bytes, bytes | None)


class ContentCodec:
    """
    Args:
        sealer: None writes plain content, and reads no other.
    """

    def __init__(self, sealer: Sealer | None = None) -> None:
        self._sealer = sealer

    @property
    def is_on(self) -> bool:
        return self._sealer is not None

    @property
    def head(self) -> bytes:
        """First bytes of the values sealed now; empty if values are not sealed."""
        return b"" if self._sealer is None else self._sealer.head

    def write_text(self, text: Text, column: str, row: object) -> Text:
        """
        Args:
            column: `table.column`.
            row: what identifies the row, as `read_text` gets it.
        """
        if not text or text in _WORDLESS_TEXTS:
            return text
        if self._sealer is None:
            return f"{_PLAIN_MARK}{text}" if text.startswith(MARK) else text
        return MARK + self._to_base64(text.encode(), column, row)

    def read_text(self, stored: Text, column: str, row: object) -> Text:
        """
        Raises:
            ContentUnreadable: also of all further methods that read.
        """
        if not stored or not stored.startswith(MARK):
            return stored
        if stored.startswith(_PLAIN_MARK):
            return stored.removeprefix(_PLAIN_MARK)
        return self._from_base64(stored.removeprefix(MARK), column, row).decode()

    def write_json(self, text: Text, column: str, row: object) -> Text:
        """
        Args:
            text: JSON, as `exact_json` writes it.
        """
        if not text or self._sealer is None or text in _WORDLESS_JSON:
            return text
        return f'"{self._to_base64(text.encode(), column, row)}"'

    def read_json(self, value: Any, column: str, row: object) -> Any:
        """
        Args:
            value: of a `json` column, as the driver parsed it.
        """
        return json.loads(self._from_base64(value, column, row)) if isinstance(value, str) else value

    def json_text(self, stored: Text, column: str, row: object) -> Text:
        """The stored JSON decrypted, as text, so that not even its spelling changes."""
        if not stored or not stored.startswith('"'):
            return stored
        return self._from_base64(json.loads(stored), column, row).decode()

    def write_bytes(self, content: Bytes, column: str, row: object) -> Bytes:
        if not content or self._sealer is None:
            return content
        return self._sealer.seal(content, _place(column, row))

    def read_bytes(self, stored: Bytes, column: str, row: object) -> Bytes:
        if not stored or len(stored) % 4 != SEALED_REST:
            return stored
        return self._open(stored, column, row)

    def write_digest(self, digest: Digest) -> Digest:
        if not digest or self._sealer is None or len(digest) == KEYED_BYTES:
            return digest
        return self._sealer.digest(digest)

    def find_digests(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """Each form in which these digests may be stored, and the digest."""
        plain = {digest: digest for digest in digests}
        return plain if self._sealer is None else plain | {self._sealer.digest(digest): digest for digest in plain}

    def _to_base64(self, content: bytes, column: str, row: object) -> str:
        assert self._sealer is not None
        return base64.b64encode(self._sealer.seal(content, _place(column, row))).decode()

    def _from_base64(self, stored: str, column: str, row: object) -> bytes:
        try:
            sealed = base64.b64decode(stored, validate=True)
        except (binascii.Error, ValueError):
            raise ContentUnreadable(f"{_place(column, row)} is damaged: it is neither plain nor encrypted") from None
        return self._open(sealed, column, row)

    def _open(self, sealed: bytes, column: str, row: object) -> bytes:
        if self._sealer is None:
            raise EncryptionKeyMissing(f"{_place(column, row)} is encrypted: set {SETTING}")
        return self._sealer.open(sealed, _place(column, row))


PLAIN = ContentCodec()

_INFO = "clawloop_content"


def put_content(info: dict[Any, Any], codec: ContentCodec) -> None:
    """Note a connection's codec in its `info`."""
    info[_INFO] = codec


def content_of(connection: AsyncConnection) -> ContentCodec:
    """The codec of the database to which this connection belongs."""
    codec: ContentCodec = connection.info[_INFO]
    return codec


def plain_length(column: str) -> str:
    """SQL for the length in bytes of what a `bytea` column holds, sealed or not."""
    return f"(octet_length({column}) - CASE WHEN octet_length({column}) % 4 = {SEALED_REST} THEN {OVERHEAD} ELSE 0 END)"


def base64_head(head: bytes) -> str:
    """The first characters of a sealed value in base64."""
    assert len(head) == HEAD_BYTES
    return base64.b64encode(head).decode()


def _place(column: str, row: object) -> str:
    return f"{column} of {row}"
