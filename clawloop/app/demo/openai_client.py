"""Sends chat requests to the gateway with the openai SDK, retries failures and counts them."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from openai import APIError, APIStatusError, AsyncOpenAI, NotFoundError, omit
from openai.types.chat import ChatCompletionMessageParam

from clawloop.core.errors import SetupError

# Seconds between attempts; the last one repeats.
_RETRY_PAUSES = (1.0, 3.0, 9.0)
# A request that is wrong stays wrong. Not at once: an engine that just restarted answers 404 until it has its versions.
_ATTEMPTS_IF_REFUSED = 4
# A part that is away comes back by itself, or a person starts it; then the demo goes on.
PATIENCE_SECONDS = 600.0
# A reply, one of 32 at once, takes most of a minute on two idle cores, and the gateway holds requests for 150 s while
# its only engine restarts.
_TIMEOUT_SECONDS = 240.0
# The longest right answer has 70 tokens. The limit keeps an endless answer from delaying the others.
MAX_TOKENS = 160
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a turn.

    Args:
        id: the completion's id.
        model: the served name of the version that answered.
        ended: by the model itself, not by the limit of tokens.
    """

    id: str
    model: str
    text: str
    ended: bool


class StreamBroken(Exception):
    """A stream ended before its reply was complete."""


class ModelGone(SetupError):
    """The gateway does not know the model that was asked for."""


class ChatClient:
    """A chat client of one policy. Use as an async context manager.

    Args:
        url: the gateway's, without `/v1`.
        key: the policy's API key.
        on_failure: called with the message of each failure.

    Attributes:
        failed: HTTP responses of 400 and above, timeouts and broken streams; each attempt counts.
    """

    def __init__(self, url: str, key: str, on_failure: Callable[[str], None] = lambda message: None) -> None:
        # No SDK retries: they would hide failures.
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=_TIMEOUT_SECONDS)
        self._on_failure = on_failure
        self.failed = 0

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def send_main_turn(
        self, messages: list[ChatCompletionMessageParam], session: str, *, last: bool, temperature: float | None = None
    ) -> Reply:
        """Send a main turn and return the streamed reply.

        Args:
            session: the client's name of the session.
            last: end the session with this turn.
            temperature: None for the policy's default.

        Raises:
            SetupError: the gateway refuses the request, or fails for longer than `PATIENCE_SECONDS`.
        """
        headers = {"X-Session-Id": session} | ({"X-Session-Done": "true"} if last else {})
        return await self._until_answered(lambda: self._stream(messages, headers, temperature))

    async def send_side_turn(
        self,
        text: str,
        model: str,
        session: str,
        *,
        system: str | None = None,
        temperature: float | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> Reply:
        """Send a side turn to one version by its served name and return the answer.

        Args:
            system: a system message before the text; None: none.
            temperature: None for the policy's default.

        Raises:
            ModelGone: no engine has this version, and it is not the active one.
            SetupError: as in `send_main_turn`.
        """

        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})

        async def ask() -> Reply:
            answer = await self._client.chat.completions.create(
                model=model,
                messages=messages,
                max_tokens=max_tokens,
                temperature=omit if temperature is None else temperature,
                extra_headers={"X-Turn-Type": "side", "X-Session-Id": session},
            )
            choice = answer.choices[0]
            return Reply(answer.id, answer.model, choice.message.content or "", choice.finish_reason == "stop")

        return await self._until_answered(ask)

    async def rate(self, reply: Reply, thumb: int) -> None:
        """Send a thumb for a reply: 1 is up, −1 is down.

        Raises:
            SetupError: as in `send_main_turn`.
        """
        body = {"response_id": reply.id, "rating": "up" if thumb > 0 else "down"}
        await self._until_answered(lambda: self._client.post("/feedback", cast_to=object, body=body))

    async def _until_answered(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        began = time.monotonic()
        for attempt in itertools.count(1):
            try:
                return await ask()
            except (APIError, StreamBroken) as error:
                self.failed += 1
                message = " ".join(str(error).split())
                self._on_failure(message)
                refused = isinstance(error, APIStatusError) and error.status_code < 500
                if (refused and attempt >= _ATTEMPTS_IF_REFUSED) or time.monotonic() - began > PATIENCE_SECONDS:
                    kind = ModelGone if isinstance(error, NotFoundError) else SetupError
                    raise kind(f"the gateway does not answer the demo's requests: {message}") from error
            await asyncio.sleep(_RETRY_PAUSES[min(attempt, len(_RETRY_PAUSES)) - 1])
        raise AssertionError("unreachable")

    async def _stream(
        self, messages: list[ChatCompletionMessageParam], headers: dict[str, str], temperature: float | None
    ) -> Reply:
        stream = await self._client.chat.completions.create(
            model="policy",
            messages=messages,
            max_tokens=MAX_TOKENS,
            temperature=omit if temperature is None else temperature,
            stream=True,
            extra_headers=headers,
        )
        pieces: list[str] = []
        reply_id = model = ""
        reason: str | None = None
        try:
            async with stream:
                async for chunk in stream:
                    reply_id, model = chunk.id, chunk.model
                    for choice in chunk.choices:
                        pieces.append(choice.delta.content or "")
                        reason = reason or choice.finish_reason
        except json.JSONDecodeError as error:
            raise StreamBroken("the stream contains invalid JSON") from error
        if reason is None:
            raise StreamBroken("the stream ended before the reply was complete")
        return Reply(reply_id, model, "".join(pieces), reason == "stop")
