"""The models of an evaluation, over OpenAI's API: the policy behind the gateway, and a model that plays the user."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NamedTuple, cast

import aiohttp
from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, omit
from openai.types.chat import ChatCompletionMessageParam

from clawloop.core.errors import SetupError
from clawloop.core.families.orders import request_as_sent
from clawloop.core.turns.thinking import without_leading_thinking
from clawloop.serving.endpoints import bearer
from clawloop.serving.served_model import ServedModels

# A long answer of a model on a CPU takes minutes.
_SECONDS = 600.0
_PAUSES = (1.0, 5.0, 20.0, 60.0)


class NoAnswer(SetupError):
    """A model of an evaluation does not answer, and waiting did not help."""


class Answer(NamedTuple):
    """
    Args:
        prompt_tokens: of the request, as the server counts them; None: it does not say.
    """

    text: str
    prompt_tokens: int | None


class ModelClient:
    """One model behind an OpenAI-compatible URL. Use as an async context manager.

    Messages are brought into an order that the model's template takes, if the server is an engine that says which.

    Args:
        name: for errors: which part of the evaluation it is.
        url: with or without `/v1`.
        answer_tokens: an answer has so many at most, thinking included.

    Attributes:
        cut: number of answers that were cut there.
    """

    def __init__(self, name: str, url: str, model: str, key: str | None, *, answer_tokens: int = 1024) -> None:
        self.answer_tokens = answer_tokens
        self.cut = 0
        self.name = name
        self._url = url
        self._model = model
        self._address = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._models = ServedModels()
        self._client = AsyncOpenAI(
            base_url=f"{self._address}/v1", api_key=key or "none", max_retries=0, timeout=_SECONDS
        )

    async def __aenter__(self) -> ModelClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def ask(
        self,
        messages: list[ChatCompletionMessageParam],
        *,
        headers: dict[str, str] | None = None,
        temperature: float | None = None,
        most_tokens: int | None = None,
    ) -> str:
        """The text of `answer`."""
        return (await self.answer(messages, headers=headers, temperature=temperature, most_tokens=most_tokens)).text

    async def answer(
        self,
        messages: list[ChatCompletionMessageParam],
        *,
        headers: dict[str, str] | None = None,
        temperature: float | None = None,
        most_tokens: int | None = None,
    ) -> Answer:
        """The answer, without thinking.

        Args:
            most_tokens: instead of `answer_tokens`; that it was cut there is not counted.

        Raises:
            NoAnswer: the model refuses the request, or does not answer.
        """
        messages = await self._as_sent(messages)
        problem = ""
        for pause in (*_PAUSES, None):
            try:
                answer = await self._client.chat.completions.create(
                    model=self._model,
                    messages=messages,
                    max_tokens=most_tokens or self.answer_tokens,
                    extra_headers=headers,
                    temperature=omit if temperature is None else temperature,
                )
                self.cut += most_tokens is None and answer.choices[0].finish_reason == "length"
                text = without_leading_thinking(answer.choices[0].message.content or "").strip()
                return Answer(text, None if answer.usage is None else answer.usage.prompt_tokens)
            except (APIConnectionError, APITimeoutError, APIStatusError) as error:
                problem = " ".join(str(error).split())[:300]
                if isinstance(error, APIStatusError) and error.status_code < 500 and error.status_code != 429:
                    break
            if pause is not None:
                await asyncio.sleep(pause)
        raise NoAnswer(f"{self.name} ({self._model} at {self._url}) does not answer: {problem}")

    async def _as_sent(self, messages: list[ChatCompletionMessageParam]) -> list[ChatCompletionMessageParam]:
        async with aiohttp.ClientSession() as session:
            found = await self._models.learn(session, self._address, bearer(self._key), self._model)
        if found is None:
            return messages
        return cast(list[ChatCompletionMessageParam], request_as_sent({"messages": messages}, found.rules)["messages"])
