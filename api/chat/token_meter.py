"""Counts the tokens that engines generated for one request, whatever becomes of them.

What is recorded of a turn is less: tokens of an attempt that broke are not kept, nor those of parts that disagree.
"""

from __future__ import annotations

import time

from api.chat.capture import Chunk
from api.chat.key_limits import Pace

# Typical of English text and of code; used only for a prompt whose tokens the engine had no time to report.
_BYTES_PER_TOKEN = 4


class TokenMeter:
    """
    Args:
        choices: of the request.
        most: tokens that a choice may have, as far as the client says; None: unknown.
    """

    def __init__(self, choices: int, most: int | None) -> None:
        self._choices = choices
        self._most = most
        self._earlier = 0  # of attempts before this one
        self._prompt = 0
        self._response = 0
        self._reported = 0
        self._body_bytes = 0
        self._sent_at: float | None = None

    def begin(self) -> None:
        """Another attempt."""
        self._earlier += self._counted()
        self._prompt = self._response = self._reported = 0
        self._sent_at = None

    def sending(self, body_bytes: int) -> None:
        """An engine is about to get the request."""
        self._body_bytes = body_bytes
        self._sent_at = time.monotonic()

    def take(self, chunk: Chunk, chat: Chunk) -> None:
        """Count a chunk of a stream, or a whole answer, before anything is removed from it.

        Args:
            chunk: as the engine sent it.
            chat: the same as a chat chunk.

        Raises:
            AttributeError, LookupError, TypeError: it is not a chat chunk.
        """
        prompt = chat.get("prompt_token_ids")
        if isinstance(prompt, list):
            self._prompt = len(prompt)
        for choice in chat["choices"]:
            ids = choice.get("token_ids")
            # Without ids at least one token for each part that says something.
            self._response += len(ids) if isinstance(ids, list) else int(_says_something(choice.get("delta") or {}))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._reported = max(self._reported, _whole(usage.get("total_tokens")))

    def total(self) -> int:
        """Tokens of prompts and replies, as far as the engines have said."""
        return self._earlier + self._counted()

    def total_of_cut(self, pace: Pace) -> int:
        """The same for a request whose client left: an engine that has said nothing yet has worked all the same."""
        if self._sent_at is None or self._counted():
            return self.total()
        each = pace.tokens_in(time.monotonic() - self._sent_at)
        response = self._choices * (each if self._most is None else min(each, self._most))
        return self._earlier + self._body_bytes // _BYTES_PER_TOKEN + response

    def set_pace(self, pace: Pace) -> None:
        """Tell how fast the engine was with this request, which has ended."""
        if self._sent_at is not None and self._response:
            pace.take(self._response / self._choices, time.monotonic() - self._sent_at)

    def _counted(self) -> int:
        return max(self._prompt + self._response, self._reported)


def _says_something(delta: Chunk) -> bool:
    return any(value for name, value in delta.items() if name != "role")


def _whole(value: object) -> int:
    return value if isinstance(value, int) and value > 0 else 0
