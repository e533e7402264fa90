"""Judge client for an OpenAI-compatible API: the base model on Clawloop's engines, or any other server.

One request asks for all answers (`n`). A server that does not support `n` gives one; the caller asks for the rest one
by one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from clawloop.errors import JudgeRefused, JudgeUnavailable
from clawloop.judging.parsing import Vote
from clawloop.judging.prompts import HINT_LIMIT, AnswerForm, JudgePrompt
from clawloop.judging.voting import choice_logprobs
from clawloop.serving.endpoints import Endpoints, JsonClient, NoReply, Reply

T = TypeVar("T")

# Several such requests fit into the activity's timeout; a judge that thinks for 2,000 tokens on a CPU takes less.
ANSWER_SECONDS = 110.0
# Judges share the engine with chats: more requests at once would only slow those down.
MAX_CONCURRENT = 8
# For thinking, and a short answer.
FREE_TOKENS = 2048
# For the answer only; a token holds at least one character.
GRAMMAR_TOKENS = HINT_LIMIT + 40
# The maximum of OpenAI's API and of vLLM by default; a grammar of three choices leaves those three among them.
TOP_LOGPROBS = 20
NO_GRAMMAR = (
    'signal.votes = "direct" needs a judge with a grammar and log-probs, and this one answers freely:'
    ' set votes = "sampled", or CLAWLOOP_JUDGE_FORM=grammar if it is vLLM'
)
NO_LOGPROBS = (
    'signal.votes = "direct": the judge does not report log-probs of 1, 0 and -1;'
    ' start it with --logprobs-mode processed_logprobs, or set votes = "sampled"'
)

_RETRYABLE = frozenset({408, 409, 425, 429})
_TOO_LONG = ("context length", "context_length", "max_model_len", "maximum model length", "too long", "too large")


class RequestClock(Protocol):
    def observe_judge_request(self, result: str, seconds: float) -> None:
        """Record one request to a judge; `result` is `answered`, `unavailable` or `refused`."""


class JudgeClient:
    """Satisfies `activities.judging.ports.Judge`. Use as an async context manager.

    Args:
        endpoints: the judge's servers.
        form: GRAMMAR for vLLM, which then allows nothing but an answer; else FREE.
        seconds: time limit of one request.
        clock: gets the duration of each request.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        form: AnswerForm,
        *,
        seconds: float = ANSWER_SECONDS,
        clock: RequestClock | None = None,
    ) -> None:
        self._clock = clock
        self._endpoints = endpoints
        self._form = form
        self._client = JsonClient(seconds)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def __aenter__(self) -> JudgeClient:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    @property
    def form(self) -> AnswerForm:
        return self._form

    async def answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[str]:
        """At most `n` answers to one question, in one request.

        Raises:
            JudgeUnavailable: try again later.
            JudgeRefused: the judge will never accept this question.
        """
        return await self._timed(lambda: self._answers(policy, prompt, n, temperature))

    async def distribution(self, policy: str, prompt: JudgePrompt) -> dict[Vote, float]:
        """Log-probs of the votes 1, 0 and -1 as the first token of a bare answer at temperature 1.

        Raises:
            JudgeUnavailable: try again later.
            JudgeRefused: the judge will never accept this question, has no grammar, or does not report log-probs.
        """
        if self._form is not AnswerForm.GRAMMAR or prompt.structured_outputs is None:
            raise JudgeRefused(NO_GRAMMAR)
        return await self._timed(lambda: self._distribution(policy, prompt))

    async def _timed(self, request: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            started = time.perf_counter()
            result = "unavailable"
            try:
                answer = await request()
                result = "answered"
                return answer
            except JudgeRefused:
                result = "refused"
                raise
            finally:
                if self._clock is not None:
                    self._clock.observe_judge_request(result, time.perf_counter() - started)

    async def _answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[str]:
        reply = await self._request(policy, prompt, n, temperature)
        if n > 1 and reply.status in (400, 422) and not _is_too_long(reply):
            reply = await self._request(policy, prompt, 1, temperature)  # the server may refuse `n`
        _check(reply)
        return _texts(reply)[:n]

    async def _distribution(self, policy: str, prompt: JudgePrompt) -> dict[Vote, float]:
        one_token = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
        reply = await self._request(policy, prompt, 1, 1.0, **one_token)
        _check(reply)
        return _vote_logprobs(reply)

    async def _request(self, policy: str, prompt: JudgePrompt, n: int, temperature: float, **others: object) -> Reply:
        body: dict[str, Any] = {"messages": prompt.messages, "temperature": temperature, "max_tokens": FREE_TOKENS}
        if n > 1:
            body["n"] = n
        if prompt.structured_outputs is not None:
            # Only vLLM has this option. Thinking would come before the grammar and use up its tokens.
            body["structured_outputs"] = prompt.structured_outputs
            body["chat_template_kwargs"] = {"enable_thinking": False}
            body["max_tokens"] = GRAMMAR_TOKENS
        try:
            return await self._client.post(self._endpoints(policy), "/v1/chat/completions", body | others)
        except NoReply as error:
            raise JudgeUnavailable(f"the judge did not answer: {error}") from error


def _check(reply: Reply) -> None:
    """
    Raises:
        JudgeUnavailable, JudgeRefused: the status is not 200.
    """
    if reply.status == 200:
        return
    if reply.status in _RETRYABLE or reply.status >= 500:
        raise JudgeUnavailable(f"the judge answered {reply.status}", retry_after_seconds=reply.retry_after_seconds)
    raise JudgeRefused(f"the judge refused: {reply.status}", too_long=_is_too_long(reply))


def _vote_logprobs(reply: Reply) -> dict[Vote, float]:
    """
    Raises:
        JudgeUnavailable: the answer is not a chat completion.
        JudgeRefused: the answer lacks the log-probs of a choice.
    """
    _texts(reply)
    try:
        token = reply.body["choices"][0]["logprobs"]["content"][0]  # type: ignore[index]
        reported = {str(top["token"]): float(top["logprob"]) for top in token["top_logprobs"]}
    except (KeyError, IndexError, TypeError, ValueError):
        raise JudgeRefused(NO_LOGPROBS) from None
    votes = choice_logprobs(reported)
    if votes is None:
        raise JudgeRefused(NO_LOGPROBS)
    return votes


def _texts(reply: Reply) -> list[str]:
    """
    Raises:
        JudgeUnavailable: the answer is not a chat completion.
        JudgeRefused: the answer is too large.
    """
    if reply.too_large:
        raise JudgeRefused("the judge's answer is too large")
    try:
        choices = (reply.body or {})["choices"]
        contents = [choice["message"].get("content") for choice in choices]
    except (KeyError, TypeError, AttributeError):
        raise JudgeUnavailable("the judge's answer is no chat completion") from None
    return [content if isinstance(content, str) else "" for content in contents]


def _is_too_long(reply: Reply) -> bool:
    text = str(reply.body).lower()
    return reply.status == 413 or (reply.status == 400 and any(phrase in text for phrase in _TOO_LONG))
