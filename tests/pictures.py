"""Pictures for tests: headers that say a size, with made-up pixels behind them."""

from __future__ import annotations

import base64
import struct
from typing import Any

from clawloop.core.contracts.turns import Message


def png(width: int = 640, height: int = 480, pixels: bytes = b"pixels") -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + pixels


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content, media_type)}}


def asks_about(content: bytes, text: str = "What is this?") -> Message:
    """A user message with a picture."""
    return {"role": "user", "content": [{"type": "text", "text": text}, image_part(content)]}
