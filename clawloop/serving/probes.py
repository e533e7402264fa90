"""Asks one version a probe on an engine that has it.

Without thinking where a model can leave it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clawloop.core.contracts.serving import Directory
from clawloop.core.contracts.training import ProbeAnswer, ProbeContent
from clawloop.core.errors import EngineUnavailable
from clawloop.core.families.template import switched
from clawloop.core.turns.thinking import without_leading_thinking
from clawloop.serving.endpoints import JUDGE_BEHIND, PRACTICE_BEHIND, place_in_queue
from clawloop.serving.engine_secret import Secret
from clawloop.serving.versions import VersionClient

# A busy CPU engine answers a prompt of 4,096 tokens within this.
ANSWER_SECONDS = 110.0


class ProbeClient(VersionClient):
    def __init__(self, directory: Callable[[], Directory], secret: Secret, *, seconds: float = ANSWER_SECONDS) -> None:
        super().__init__(directory, secret, seconds)

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
            after_chats: nothing waits for it, so that the engine computes all else first.

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
            **place_in_queue(PRACTICE_BEHIND if after_chats else JUDGE_BEHIND),
        }
        if content.tools:
            body["tools"] = [dict(tool) for tool in content.tools]
        asked = f"a probe of version {version} of {policy}"
        return _read(await self._completion([endpoint for _, endpoint in engines], body, asked))


def _read(body: dict[str, Any]) -> ProbeAnswer:
    """
    Raises:
        EngineUnavailable: the body is no chat completion.
    """
    try:
        choice = body["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return ProbeAnswer(
            text=without_leading_thinking(str(message.get("content") or "")),  # of an engine without a parser for it
            tool_calls=[(str(call.get("name") or ""), str(call.get("arguments") or "")) for call in calls],
            cut=choice.get("finish_reason") == "length",
        )
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EngineUnavailable("an engine's answer to a probe is no chat completion") from None
