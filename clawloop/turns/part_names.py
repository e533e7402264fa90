"""Names content parts that are no text: an image, sound, video, a file; for judges and for people."""

from __future__ import annotations

import re

from pydantic import JsonValue

from clawloop.turns.files import FileReference, references_of

# vLLM reads a part by its type, or by the key that holds its content.
KINDS = ("image", "audio", "video", "file")
_LONGEST_ADDRESS = 200
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)


def kind_of_part(part: dict[str, JsonValue]) -> str | None:
    """`image`, `audio`, `video` or `file`; None for a part of another kind."""
    said = " ".join([str(part.get("type", "")), *part])
    return next((kind for kind in KINDS if kind in said), None)


def for_judges(part: dict[str, JsonValue]) -> str | None:
    """What a judge is told of a part in place of it, as `image: image/png, 640x480`; None for an unknown kind."""
    if (kind := kind_of_part(part)) is None:
        return None
    said = [_told(reference, kind) for reference in references_of(part)]
    return "; ".join(said or [f"{kind}: {address}" for address in _addresses(part)]) or kind


def for_people(part: dict[str, JsonValue]) -> str | None:
    """As `for_judges`, with size and hash: `image/png, 12 kB, 640x480, sha256 1f2e3d4c5b6a…`."""
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
