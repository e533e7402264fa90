"""Files in messages by reference, what kind of picture they are, and how parts that are no text are named."""

from __future__ import annotations

import base64
import binascii
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.turns.canonical import TEXT_PARTS
from clawloop.core.turns.thinking import THINKING_PARTS

# Pictures -------------------------------------------------------------------------------------------------------------
# What kind of picture some bytes are, and how large it is, by their header alone: nothing is decoded.

_PNG = b"\x89PNG\r\n\x1a\n"
_GIFS = (b"GIF87a", b"GIF89a")
_JPEG = b"\xff\xd8\xff"
# JPEG's markers that carry the size: every SOF but those of tables (DHT, JPG, DAC).
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SEGMENTS = 2000  # a picture has some tens of them

Size = tuple[int, int]


def picture_type(content: bytes) -> str | None:
    """The media type of a picture that every browser shows; None for everything else, SVG with its scripts too."""
    if content.startswith(_PNG):
        return "image/png"
    if content.startswith(_JPEG):
        return "image/jpeg"
    if content.startswith(_GIFS):
        return "image/gif"
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "image/webp"
    return None


def picture_size(content: bytes) -> Size | None:
    """Width and height in pixels, as the header says them; None if it does not."""
    read = _SIZES.get(picture_type(content) or "")
    if read is None:
        return None
    try:
        size = read(content)
    except (struct.error, IndexError):  # cut short
        return None
    return size if size is not None and all(size) else None


def _png(content: bytes) -> Size | None:
    width, height = struct.unpack_from(">II", content, 16)
    return (width, height) if content[12:16] == b"IHDR" else None


def _gif(content: bytes) -> Size:
    width, height = struct.unpack_from("<HH", content, 6)
    return width, height


def _webp(content: bytes) -> Size | None:
    match content[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(content[at : at + 3], "little") for at in (24, 27))
            return (width + 1, height + 1) if len(content) >= 30 else None
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", content, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = struct.unpack_from("<HH", content, 26)
            return width & 0x3FFF, height & 0x3FFF
    return None


def _jpeg(content: bytes) -> Size | None:
    at = 2
    for _ in range(_JPEG_SEGMENTS):
        if content[at] != 0xFF:
            return None
        marker = content[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in _JPEG_SIZES:
            height, width = struct.unpack_from(">HH", content, at + 5)
            return width, height
        (length,) = struct.unpack_from(">H", content, at + 2)
        at += 2 + length
    return None


_SIZES: dict[str, Callable[[bytes], Size | None]] = {
    "image/png": _png,
    "image/gif": _gif,
    "image/webp": _webp,
    "image/jpeg": _jpeg,
}


# Names ----------------------------------------------------------------------------------------------------------------
# Names content parts that are no text: an image, sound, video, a file; for judges and for people.

# vLLM reads a part by its type, or by the key that holds its content.
KINDS = ("image", "audio", "video", "file")
_LONGEST_ADDRESS = 200
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)


def kind_of_part(part: dict[str, JsonValue]) -> str | None:
    """`image`, `audio`, `video` or `file`; None for a part of another kind."""
    said = " ".join([str(part.get("type", "")), *part])
    return next((kind for kind in KINDS if kind in said), None)


def for_judges(part: dict[str, JsonValue]) -> str | None:
    """Description of a file part for judges, such as `image: image/png, 640x480`; None for an unknown kind."""
    if (kind := kind_of_part(part)) is None:
        return None
    said = [_told(reference, kind) for reference in references_of(part)]
    return "; ".join(said or [f"{kind}: {address}" for address in _addresses(part)]) or kind


def for_people(part: dict[str, JsonValue]) -> str | None:
    """Description of a file part for people, with size and hash: `image/png, 12 kB, 640x480, sha256 1f2e3d4c5b6a…`."""
    if (kind := kind_of_part(part)) is None:
        return None
    said = [described(reference, kind) for reference in references_of(part)]
    return "; ".join(said or [f"{kind} {address}" for address in _addresses(part)]) or kind


def described(reference: FileReference, kind: str) -> str:
    said = [_media_type(reference) or kind]
    said += [] if reference.size_bytes is None else [_size(reference.size_bytes)]
    said += _pixels(reference)
    return ", ".join([*said, f"sha256 {reference.sha256[:12]}…"])


def _told(reference: FileReference, kind: str) -> str:
    known = [media_type] if (media_type := _media_type(reference)) else []
    said = ", ".join([*known, *_pixels(reference)])
    return f"{kind}: {said}" if said else kind


def _media_type(reference: FileReference) -> str | None:
    match = _MEDIA_TYPE.match(reference.media_type or "")
    return match[0] if match else None


def _pixels(reference: FileReference) -> list[str]:
    return [] if reference.width is None else [f"{reference.width}x{reference.height}"]


def _size(size_bytes: int) -> str:
    if size_bytes < 1000:
        return "1 byte" if size_bytes == 1 else f"{size_bytes} bytes"
    return f"{size_bytes / 1000:.0f} kB" if size_bytes < 1_000_000 else f"{size_bytes / 1_000_000:.1f} MB"


def _addresses(part: dict[str, JsonValue]) -> list[str]:
    values = list(part.values())
    values += [inner for value in values if isinstance(value, dict) for inner in value.values()]
    return [
        value[:_LONGEST_ADDRESS]
        for value in values
        if isinstance(value, str) and value.startswith(("http://", "https://"))
    ]


# References -----------------------------------------------------------------------------------------------------------
# Files in messages by reference: an image that a client sends as a data URL is stored once, under its SHA-256.
#
# Engines get messages as clients sent them. What is recorded has in place of each file `{"stored_file": {"sha256": …,
# "media_type": …, "bytes": …, "width": …, "height": …}}`, and it is this form that prefix hashes are of: the same
# image gives the same hash in each turn, whatever the lines of its base64, and another image another one. An address
# (`https://…`) is recorded as it is, and nobody fetches it. Never raises for a message of any shape.

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
    """The files of a content part: those it refers to, and those it still holds as base64."""
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
