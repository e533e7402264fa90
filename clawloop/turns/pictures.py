"""What kind of picture some bytes are, and how large it is, by their header alone: nothing is decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable

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
