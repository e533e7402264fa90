"""Asks one version a probe on an engine that has it.

Without thinking where a model can leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clawloop.core.contracts.serving import Directory
from clawloop.core.contracts.training import ProbeAnswer, ProbeContent
from clawloop.core.errors import EngineRejected, EngineUnavailable
from clawloop.core.families.template import switched
from clawloop.core.ids import version_name
from clawloop.core.turns.thinking import without_leading_thinking
from clawloop.serving.endpoints import AFTER_CHATS, BEFORE_CHATS, Endpoint, JsonClient, NoReply
from clawloop.serving.engine_secret import Secret

# A busy CPU engine answers a prompt of 4,096 tokens within this.
ANSWER_SECONDS = 110.0
# 404: the engine restarted and lacks the version; its agent loads it again. 401: another engine may have the secret.
_RETRYABLE = frozenset({401, 404, 408, 409, 425, 429})


class ProbeClient:
    """Use as an async context manager.

    Args:
        directory: current policies and engines.
        secret: the engines'.
    """

    def __init__(self, directory: Callable[[], Directory], secret: Secret, *, seconds: float = ANSWER_SECONDS) -> None:
        self._directory = directory
        self._secret = secret
        self._client = JsonClient(seconds)

    async def __aenter__(self) -> ProbeClient:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def answer(
        self,
        policy: str,
        version: int,
        content: ProbeContent,
        max_tokens: int,
        *,
        temperature: float = 0.0,
        after_chats: bool = False,
    ) -> ProbeAnswer:
        """The version's answer.

        Args:
            temperature: 0, so that two versions differ by their weights alone.
            after_chats: nothing waits for it, so that the engine computes chats first.

        Raises:
            EngineUnavailable: no engine has the version, or it did not answer; retry.
            EngineRejected: the engine will never take this probe.
        """
        engines = self._engines(policy, version)
        if not engines:
            raise EngineUnavailable(f"no engine has version {version} of {policy}")
        body: dict[str, Any] = {
            "messages": list(content.messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            **({} if content.thinks else {"chat_template_kwargs": switched(False)}),
            **(AFTER_CHATS if after_chats else BEFORE_CHATS),
        }
        if content.tools:
            body["tools"] = [dict(tool) for tool in content.tools]
        try:
            reply = await self._client.post(engines, "/v1/chat/completions", body)
        except NoReply as error:
            raise EngineUnavailable(f"version {version} of {policy} did not answer: {error}") from error
        if reply.status >= 500 or reply.status in _RETRYABLE:
            raise EngineUnavailable(f"an engine answered {reply.status} for version {version} of {policy}")
        if reply.status != 200:
            raise EngineRejected(reply.status, {"message": "the engine refused a probe"})
        return _read(reply.body)

    def _engines(self, policy: str, version: int) -> list[Endpoint]:
        now = self._directory()
        base = next((each.base_model for each in now.policies if each.id == policy), None)
        return [
            Endpoint(engine.url, version_name(policy, version, base), self._secret())
            for engine in now.engines
            if base is not None and not engine.draining
            if version == 0 or version in engine.versions.get(policy, frozenset())
        ]


def _read(body: dict[str, Any] | None) -> ProbeAnswer:
    """
    Raises:
        EngineUnavailable: the body is no chat completion.
    """
    try:
        choice = (body or {})["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return ProbeAnswer(
            text=without_leading_thinking(str(message.get("content") or "")),  # of an engine without a parser for it
            tool_calls=[(str(call.get("name") or ""), str(call.get("arguments") or "")) for call in calls],
            cut=choice.get("finish_reason") == "length",
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EngineUnavailable("an engine's answer to a probe is no chat completion") from None
