"""What an engine sends, as JSON objects; an answer of another shape is an error with a status of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from api.chat.capture import Chunk
from clawloop.errors import EngineAnswerUnusable, EngineBroke


def parse_chunk(data: bytes) -> Chunk:
    """
    Raises:
        EngineBroke: the engine reports an error in place of an answer.
        EngineAnswerUnusable: the data is not a JSON object.
    """
    try:
        chunk: Any = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise EngineAnswerUnusable(f"not JSON ({error})") from error
    if not isinstance(chunk, dict):
        raise EngineAnswerUnusable("not a JSON object")
    if (reported := chunk.get("error")) is not None:
        raise EngineBroke(str(reported.get("message") if isinstance(reported, dict) else reported))
    return chunk


@contextmanager
def reading_answer(what: str) -> Iterator[None]:
    """
    Args:
        what: that is read or written, e.g. `a chunk is not a chat chunk`.

    Raises:
        EngineAnswerUnusable: the engine's JSON has another shape than the code expects.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise EngineAnswerUnusable(f"{what} ({type(error).__name__})") from error
