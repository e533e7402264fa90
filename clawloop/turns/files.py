"""Files in messages by reference: an image that a client sends as a data URL is stored once, under its SHA-256.

Engines get messages as clients sent them. What is recorded has in place of each file
`{"stored_file": {"sha256": …, "media_type": …, "bytes": …, "width": …, "height": …}}`, and it is this form that prefix
hashes are of: the same image gives the same hash in each turn, whatever the lines of its base64, and another image
another one. An address (`https://…`) is recorded as it is, and nobody fetches it. Never raises for a message of any
shape.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pydantic import JsonValue

from clawloop.contracts.turns import Message
from clawloop.turns.canonical import TEXT_PARTS
from clawloop.turns.pictures import picture_size
from clawloop.turns.thinking import THINKING_PARTS

STORED = "stored_file"

_DATA_URL = re.compile(r"data:([^,;]*(?:;[^,;]*)*?);base64,", re.IGNORECASE)
_LONGEST_HEADER = 200
# Fields whose base64 has no `data:` before it: of OpenAI's `input_audio` and `file`, and of vLLM's tensors. Shorter
# values are no files.
_BARE_FIELDS = frozenset({"data", "file_data", "image_embeds", "audio_embeds"})
_SHORTEST_BARE = 64
# A part's own fields, and those of the object in it: `image_url.url`.
_LEVELS = 2
_READ = TEXT_PARTS | THINKING_PARTS
_URL_ALPHABET = str.maketrans("-_", "+/")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ContentFile:
    """
    Args:
        sha256: of the content, in hexadecimal.
    """

    sha256: str
    content: bytes


@dataclass(frozen=True, slots=True)
class FileReference:
    """
    Args:
        media_type: as the client said it; None for base64 without a data URL around it.
        size_bytes, width, height: None if unknown.
    """

    sha256: str
    media_type: str | None
    size_bytes: int | None
    width: int | None
    height: int | None


def take_files(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[ContentFile, ...]]]:
    """The messages with references in place of files, and the files of each message.

    A message without files stays the same object.
    """
    taken: list[Message] = []
    files: list[tuple[ContentFile, ...]] = []
    for message in messages:
        found: list[ContentFile] = []
        content = message.get("content")
        if isinstance(content, list) and not all(map(_holds_none, content)):
            parts = [part if _holds_none(part) else _taken(part, found, _LEVELS) for part in content]
            message = message | {"content": parts} if found else message
        taken.append(message)
        files.append(tuple(found))
    return taken, files


def references_in(messages: Sequence[Message]) -> set[str]:
    """SHA-256 of each file that these messages refer to."""
    found: set[str] = set()
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            found |= {reference.sha256 for reference in references_of(part)}
    return found


def references_of(part: JsonValue) -> list[FileReference]:
    """The files that a content part refers to; those that it still holds itself as well."""
    taken = part if _holds_none(part) else _taken(part, [], _LEVELS)
    values = list(taken.values()) if isinstance(taken, dict) else []
    values += [inner for value in values if isinstance(value, dict) for inner in value.values()]
    return [reference for value in values if (reference := _reference(value)) is not None]


def give_back(messages: Sequence[Message], files: Mapping[str, bytes]) -> list[Message]:
    """The messages with files in place of references, as an engine reads them; a file that is not here stays one."""
    given: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and not all(map(_holds_none, content)):
            parts = [part if _holds_none(part) else _given(part, files, _LEVELS) for part in content]
            message = message | {"content": parts}
        given.append(message)
    return given


def _holds_none(part: JsonValue) -> bool:
    return not isinstance(part, dict) or str(part.get("type")) in _READ


def _taken(value: JsonValue, found: list[ContentFile], levels: int, field: str = "") -> JsonValue:
    if isinstance(value, str):
        return _taken_text(value, found, field)
    if isinstance(value, dict) and levels and STORED not in value:
        return {name: _taken(inner, found, levels - 1, name) for name, inner in value.items()}
    return value


def _taken_text(text: str, found: list[ContentFile], field: str) -> JsonValue:
    media_type: str | None = None
    encoded = text
    if match := _DATA_URL.match(text[:_LONGEST_HEADER]):
        media_type, encoded = match[1], text[match.end() :]
    elif field not in _BARE_FIELDS or len(text) < _SHORTEST_BARE:
        return text
    if not (content := _decoded(encoded)):
        return text
    file = ContentFile(sha256(content).hexdigest(), content)
    found.append(file)
    reference: dict[str, JsonValue] = {"sha256": file.sha256, "bytes": len(content)}
    if media_type is not None:
        reference["media_type"] = media_type
    if (size := picture_size(content)) is not None:
        reference["width"], reference["height"] = size
    return {STORED: reference}


def _decoded(text: str) -> bytes | None:
    """None if it is no base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    # In lines, in the alphabet of URLs, or without padding: decoders of engines take these as well.
    plain = "".join(text.split()).translate(_URL_ALPHABET).rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        return None


def _reference(value: JsonValue) -> FileReference | None:
    stored = value.get(STORED) if isinstance(value, dict) else None
    if not isinstance(stored, dict):
        return None
    digest, media_type = stored.get("sha256"), stored.get("media_type")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        return None
    numbers = [stored.get(name) for name in ("bytes", "width", "height")]
    size, width, height = (one if isinstance(one, int) else None for one in numbers)
    return FileReference(digest, media_type if isinstance(media_type, str) else None, size, width, height)


def _given(value: Any, files: Mapping[str, bytes], levels: int) -> Any:
    if not isinstance(value, dict):
        return value
    if (reference := _reference(value)) is not None:
        content = files.get(reference.sha256)
        if content is None:
            return value
        encoded = base64.b64encode(content).decode()
        return encoded if reference.media_type is None else f"data:{reference.media_type};base64,{encoded}"
    return {name: _given(inner, files, levels - 1) for name, inner in value.items()} if levels else value
