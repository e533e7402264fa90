"""Columns of conversations: arrays as bytes, exact JSON, and content as it is or encrypted."""

from __future__ import annotations

import base64
import binascii
import json
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar
from uuid import UUID

from pydantic import JsonValue
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import UserDefinedType

from clawloop.core.encryption.key_file import SETTING
from clawloop.core.encryption.sealer import HEAD_BYTES, KEYED_BYTES, OVERHEAD, Sealer
from clawloop.core.errors import ContentUnreadable, EncryptionKeyMissing, RecordUnusable
from clawloop.core.judging.hints import PromptChange

# Arrays ---------------------------------------------------------------------------------------------------------------
# Encodes token ids and log-probs as bytes, without loss.
#
# bytea rather than int4[] and float4[]: the same size on disk, and 32,000 of each are written in 9 ms instead of 29
# and read in 1 instead of 3 (measured). Little-endian, without header.
#
# A token id takes 4 bytes. A log-prob takes 4 if all log-probs of the turn are float32 values, which is what vLLM
# computes (it prints them as doubles), and 8 otherwise: nothing is rounded.

ID_BYTES = 4
_FLOAT32_BYTES = 4
_FLOAT64_BYTES = 8


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """The ids as 32-bit integers.

    Raises:
        RecordUnusable: an id does not fit in 32 bits.
    """
    try:
        return _little_endian(array("i", ids))
    except OverflowError as error:
        raise RecordUnusable("a token id does not fit in 32 bits") from error


def bytes_to_ids(stored: bytes) -> list[int]:
    return _integers(stored)


def changes_to_bytes(changes: Mapping[int, PromptChange]) -> bytes:
    """Hinted prompts by what they add: of each its place, its start, its end, the number of added ids, and these."""
    parts = ((place, one.start, one.end, len(one.added), *one.added) for place, one in changes.items())
    return ids_to_bytes([value for part in parts for value in part])


def bytes_to_changes(stored: bytes) -> dict[int, PromptChange]:
    """
    Raises:
        RecordUnusable: the numbers do not add up.
    """
    values = _integers(stored)
    changes: dict[int, PromptChange] = {}
    at = 0
    while at < len(values):
        place, start, end, count = values[at : at + 4] if at + 4 <= len(values) else (0, 0, 0, -1)
        at += 4 + count
        if count < 0 or at > len(values):
            raise RecordUnusable(f"{len(values)} numbers are not the tokens that hints add")
        changes[place] = PromptChange(start, end, tuple(values[at - count : at]))
    return changes


def logprobs_to_bytes(logprobs: Sequence[float]) -> bytes:
    narrow = array("f", logprobs)
    wide = array("d", logprobs)
    return _little_endian(narrow if array("d", narrow) == wide else wide)


def bytes_to_logprobs(stored: bytes, count: int) -> list[float]:
    """The log-probs of `count` tokens.

    Raises:
        RecordUnusable: the length fits another number of tokens.
    """
    if len(stored) == count * _FLOAT32_BYTES:
        return _floats("f", stored)
    if len(stored) == count * _FLOAT64_BYTES:
        return _floats("d", stored)
    raise RecordUnusable(f"{len(stored)} bytes of log-probs for {count} tokens")


def advantages_to_bytes(advantages: Sequence[float | None]) -> bytes:
    """Float32, which is what the trainer computes; NaN for a token without one."""
    return _little_endian(array("f", [math.nan if value is None else value for value in advantages]))


def bytes_to_advantages(stored: bytes) -> list[float | None]:
    return [None if math.isnan(value) else value for value in _floats("f", stored)]


def shared_ids(left: bytes, right: bytes) -> int:
    """Length of the common prefix of two encoded id sequences."""
    low, high = 0, min(len(left), len(right)) // ID_BYTES
    while low < high:  # bisection over byte comparisons is faster than any loop over ids
        middle = (low + high + 1) // 2
        same = left[low * ID_BYTES : middle * ID_BYTES] == right[low * ID_BYTES : middle * ID_BYTES]
        low, high = (middle, high) if same else (low, middle - 1)
    return low


def _little_endian(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _integers(stored: bytes) -> list[int]:
    values = array("i", stored)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _floats(code: Literal["f", "d"], stored: bytes) -> list[float]:
    values = array(code, stored)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


# Exact JSON -----------------------------------------------------------------------------------------------------------
# Stores JSON exactly: key order, number types, NUL characters and lone surrogates are preserved.
#
# Columns are `json`, never `jsonb`, which drops key order, refuses NUL and rewrites numbers. Compare values by their
# texts, as in Python `1 == 1.0 == True`.

_PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ESCAPED = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def exact_json(value: JsonValue) -> str:
    """The value as compact JSON text.

    Raises:
        RecordUnusable: the value holds NaN or infinity, which JSON cannot represent, or is nested too deeply.
    """
    try:
        text = _PLAIN.encode(value)
    except ValueError as error:
        raise RecordUnusable(f"a number cannot be written as JSON: {error}") from error
    except RecursionError as error:
        raise RecordUnusable("the JSON is nested too deeply") from error
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be stored escaped
        return _ESCAPED.encode(value)
    return text


class ExactJson(UserDefinedType[Any]):
    """A `json` column: takes the text of `exact_json`, returns the value."""

    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "JSON"


def storable(text: str) -> str:
    """Text with NUL and lone surrogates replaced, which PostgreSQL text columns refuse."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


# Rows -----------------------------------------------------------------------------------------------------------------
# Names of the rows with a key of several columns, to which encrypted content is bound.

ANSWER_KEY = ("judgement_id", "kind", "index")


def answer_row(judgement: UUID, kind: str, index: int) -> str:
    """Name of a row of `votes` or `hints`."""
    return f"{judgement}/{kind}/{index}"


def step_sample_row(policy: str, step: int, sample: UUID) -> str:
    """Name of a row of `step_samples`."""
    return f"{policy}/{step}/{sample}"


# Content --------------------------------------------------------------------------------------------------------------
# Writes and reads the columns that hold what conversations hold: as they are, or encrypted.
#
# The one place of the database's side that knows of encryption. A sealed value and a plain one may stand side by side
# in a column, and each says itself which it is: sealed JSON is a JSON string, where plain content is an object or a
# list; sealed text begins with a mark; sealed bytes have a length that is no multiple of 4. What says nothing (an
# empty list, text or array, and what an erasure leaves) stays as it is.
#
# A digest of content is found by its stored form: keyed while content is encrypted. Plain digests of rows from before
# the encryption stay findable until `clawloop encryption rotate` has keyed them.

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


def token_count(ids: str) -> str:
    """SQL for the number of ids in a `bytea` column, sealed or not."""
    return f"({plain_length(ids)} / {ID_BYTES})"


def base64_head(head: bytes) -> str:
    """The first characters of a sealed value in base64."""
    assert len(head) == HEAD_BYTES
    return base64.b64encode(head).decode()


def _place(column: str, row: object) -> str:
    return f"{column} of {row}"
