"""A judge behind an OpenAI-compatible API: the base model of our own engines, or any other.

Knows nothing about verdicts. One request asks for all answers at once (`n`); a server that does not know `n` gives
one, and the rest is asked for one by one.
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

# Below the activity's limit for several such requests; a judge that thinks for 2,000 tokens on a CPU stays below.
ANSWER_SECONDS = 110.0
# Judges share the engine with people who chat: more at once would only make those wait.
AT_ONCE = 8
# Room to think, and a short answer.
FREE_TOKENS = 2048
# Nothing but the answer; a token holds at least a character.
GRAMMAR_TOKENS = HINT_LIMIT + 40
# The most that OpenAI's form and vLLM's default allow; masked by a grammar of three choices, they are among them.
TOP_LOGPROBS = 20
NO_GRAMMAR = (
    'signal.votes = "direct" needs a judge with a grammar and log-probs, and this one answers freely:'
    ' set votes = "sampled", or CLAWLOOP_JUDGE_FORM=grammar if it is vLLM'
)
NO_LOGPROBS = (
    'signal.votes = "direct": the judge does not report log-probs of 1, 0 and -1;'
    ' start it with --logprobs-mode processed_logprobs, or set votes = "sampled"'
)

_COME_BACK = frozenset({408, 409, 425, 429})
_TOO_LONG = ("context length", "context_length", "max_model_len", "maximum model length", "too long", "too large")


class RequestClock(Protocol):
    def asked(self, result: str, seconds: float) -> None:
        """A request to a judge ended: `answered`, `unavailable` or `refused`."""


class JudgeClient:
    """Satisfies `activities.judging.ports.Judge`. Use as an async context manager.

    Args:
        endpoints: who is asked.
        form: GRAMMAR where they are vLLM: then nothing but an answer can be written; else FREE.
        clock: told how long each question took; None tells nobody.
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
        self._at_once = asyncio.Semaphore(AT_ONCE)

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
            JudgeUnavailable: ask again later.
            JudgeRefused: it will never take this question.
        """
        return await self._timed(lambda: self._answers(policy, prompt, n, temperature))

    async def distribution(self, policy: str, prompt: JudgePrompt) -> dict[Vote, float]:
        """Log-probs of the votes 1, 0 and -1 as the first token of a bare answer at temperature 1.

        Raises:
            JudgeUnavailable: ask again later.
            JudgeRefused: it will never take this question, writes free answers, or does not report log-probs.
        """
        if self._form is not AnswerForm.GRAMMAR or prompt.structured_outputs is None:
            raise JudgeRefused(NO_GRAMMAR)
        return await self._timed(lambda: self._distribution(policy, prompt))

    async def _timed(self, ask: Callable[[], Awaitable[T]]) -> T:
        async with self._at_once:
            began = time.perf_counter()
            result = "unavailable"
            try:
                answered = await ask()
                result = "answered"
                return answered
            except JudgeRefused:
                result = "refused"
                raise
            finally:
                if self._clock is not None:
                    self._clock.asked(result, time.perf_counter() - began)

    async def _answers(self, policy: str, prompt: JudgePrompt, n: int, temperature: float) -> list[str]:
        reply = await self._ask(policy, prompt, n, temperature)
        if n > 1 and reply.status in (400, 422) and not _is_too_long(reply):
            reply = await self._ask(policy, prompt, 1, temperature)  # perhaps it was `n` that it refused
        _check(reply)
        return _texts(reply)[:n]

    async def _distribution(self, policy: str, prompt: JudgePrompt) -> dict[Vote, float]:
        one_token = {"max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
        reply = await self._ask(policy, prompt, 1, 1.0, **one_token)
        _check(reply)
        return _first_token(reply)

    async def _ask(self, policy: str, prompt: JudgePrompt, n: int, temperature: float, **others: object) -> Reply:
        body: dict[str, Any] = {"messages": prompt.messages, "temperature": temperature, "max_tokens": FREE_TOKENS}
        if n > 1:
            body["n"] = n
        if prompt.structured_outputs is not None:
            # Only vLLM is asked in this form; thoughts would come before the grammar and use up its tokens.
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
        JudgeUnavailable, JudgeRefused: it is no answer.
    """
    if reply.status == 200:
        return
    if reply.status in _COME_BACK or reply.status >= 500:
        raise JudgeUnavailable(f"the judge answered {reply.status}", retry_after_seconds=reply.retry_after_seconds)
    raise JudgeRefused(f"the judge refused: {reply.status}", too_long=_is_too_long(reply))


def _first_token(reply: Reply) -> dict[Vote, float]:
    """
    Raises:
        JudgeUnavailable: the answer is no chat completion.
        JudgeRefused: it lacks the log-probs of a choice.
    """
    _texts(reply)
    try:
        token = reply.body["choices"][0]["logprobs"]["content"][0]  # type: ignore[index]
        reported = {str(other["token"]): float(other["logprob"]) for other in token["top_logprobs"]}
    except (KeyError, IndexError, TypeError, ValueError):
        raise JudgeRefused(NO_LOGPROBS) from None
    found = choice_logprobs(reported)
    if found is None:
        raise JudgeRefused(NO_LOGPROBS)
    return found


def _texts(reply: Reply) -> list[str]:
    """
    Raises:
        JudgeUnavailable: the answer is no chat completion.
        JudgeRefused: it is larger than any answer.
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
    said = str(reply.body).lower()
    return reply.status == 413 or (reply.status == 400 and any(words in said for words in _TOO_LONG))
