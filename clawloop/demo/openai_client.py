"""Requests to the gateway as any client sends them, with the openai SDK, each failure counted.

Knows nothing about who asks or why.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from openai import APIError, AsyncOpenAI, omit
from openai.types.chat import ChatCompletionMessageParam

from clawloop.errors import SetupError

# Of a gateway that answers nobody a demo cannot be made; four tries with these pauses outlast a restarting gateway.
_PAUSES_SECONDS = (1.0, 3.0, 9.0)
# A reply takes seconds; the gateway itself holds requests for 150 s while its only engine restarts.
_REPLY_SECONDS = 180.0
# The longest right answer has 70 tokens. One that never ends should not hold up the others.
MOST_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Reply:
    """
    Args:
        id: what the gateway calls it.
        model: the version that answered, by its served name.
    """

    id: str
    model: str
    text: str


class StreamBroke(Exception):
    """A stream ended before its reply did."""


class ChatClient:
    """Talks to one policy. Use as an async context manager.

    Args:
        url: the gateway's, without `/v1`.
        key: of the policy.
        told: hears of each failure, in words.

    Attributes:
        failed: HTTP answers of 400 and above, answers that never came and streams that broke, each one counted
            whether or not it was asked again.
    """

    def __init__(self, url: str, key: str, told: Callable[[str], None] = lambda words: None) -> None:
        # Retries are ours: the SDK's own would hide what failed.
        self._client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=_REPLY_SECONDS)
        self._told = told
        self.failed = 0

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def say(
        self, messages: list[ChatCompletionMessageParam], session: str, *, last: bool, temperature: float | None = None
    ) -> Reply:
        """A main turn, streamed.

        Args:
            session: by which the gateway knows the conversation.
            last: the session ends with it.
            temperature: None for the policy's.

        Raises:
            SetupError: it failed again and again.
        """
        headers = {"X-Session-Id": session} | ({"X-Session-Done": "true"} if last else {})
        for pause in (*_PAUSES_SECONDS, None):
            try:
                return await self._stream(messages, headers, temperature)
            except (APIError, StreamBroke) as error:
                await self._failed(error, pause)
        raise AssertionError  # the last pause raises

    async def ask_aside(self, text: str, model: str, session: str) -> str:
        """A side turn, asked of one version by its name; returns the answer."""
        headers = {"X-Turn-Type": "side", "X-Session-Id": session}
        for pause in (*_PAUSES_SECONDS, None):
            try:
                answer = await self._client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": text}],
                    max_tokens=MOST_TOKENS,
                    extra_headers=headers,
                )
                return answer.choices[0].message.content or ""
            except APIError as error:
                await self._failed(error, pause)
        raise AssertionError

    async def _stream(
        self, messages: list[ChatCompletionMessageParam], headers: dict[str, str], temperature: float | None
    ) -> Reply:
        stream = await self._client.chat.completions.create(
            model="policy",
            messages=messages,
            max_tokens=MOST_TOKENS,
            temperature=omit if temperature is None else temperature,
            stream=True,
            extra_headers=headers,
        )
        pieces: list[str] = []
        reply_id = model = ""
        ended = False
        try:
            async with stream:
                async for chunk in stream:
                    reply_id, model = chunk.id, chunk.model
                    for choice in chunk.choices:
                        pieces.append(choice.delta.content or "")
                        ended = ended or choice.finish_reason is not None
        except json.JSONDecodeError as error:
            raise StreamBroke("the stream holds what is no JSON") from error
        if not ended:
            raise StreamBroke("the stream ended before the reply did")
        return Reply(reply_id, model, "".join(pieces))

    async def _failed(self, error: Exception, pause: float | None) -> None:
        self.failed += 1
        words = " ".join(str(error).split())
        self._told(words)
        if pause is None:
            raise SetupError(f"the gateway does not answer the demo's requests: {words}") from error
        await asyncio.sleep(pause)
