"""An engine's answers as JSON objects; an answer of an unexpected shape is an error with a status of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import orjson

from api.chat.capture import Chunk
from clawloop.errors import EngineAnswerUnusable, EngineBroke

_WRONG_SHAPE = (AttributeError, LookupError, TypeError, ValueError)


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


class ReadingAnswer(AbstractContextManager[None]):
    """Turns errors raised inside, by engine JSON of an unexpected shape, into `EngineAnswerUnusable`.

    A class without state: a stream enters it twice a chunk, and a generator costs ten times as much.

    Args:
        what: the problem, e.g. `a chunk is not a chat chunk`.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and isinstance(error, _WRONG_SHAPE):
            raise EngineAnswerUnusable(f"{self._what} ({type(error).__name__})") from error
