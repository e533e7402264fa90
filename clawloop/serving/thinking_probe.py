"""Asks engines how their model thinks: `/tokenize` renders a chat by the engine's own template."""

from __future__ import annotations

from typing import Any

from clawloop.errors import JudgeUnavailable
from clawloop.families.thinking import Thinking, switched, thinking_of
from clawloop.serving.endpoints import Endpoint, Endpoints, JsonClient, NoReply

# Rendering takes milliseconds; a busy engine's event loop, some seconds.
_SECONDS = 60.0
_CHAT = [{"role": "user", "content": "Hello"}]
# How byte-level tokenizers write a space.
_SPACE = "\u0120"


class ThinkingProbe:
    """Use as an async context manager. Each model is asked about once, and again when its engines are others."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._client = JsonClient(_SECONDS)
        self._known: dict[tuple[Endpoint, ...], Thinking] = {}

    async def __aenter__(self) -> ThinkingProbe:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def of(self, policy: str) -> Thinking:
        """When the base model of a policy thinks; NEVER for a server that does not render chats.

        Raises:
            JudgeUnavailable: no engine answered.
        """
        engines = tuple(self._endpoints(policy))
        if engines not in self._known:
            on, off = [await self._rendered(engines, is_on) for is_on in (True, False)]
            self._known[engines] = thinking_of(on, off)
        return self._known[engines]

    async def _rendered(self, engines: tuple[Endpoint, ...], is_on: bool) -> str:
        body: dict[str, Any] = {
            "messages": _CHAT,
            "add_generation_prompt": True,
            "return_token_strs": True,
            "chat_template_kwargs": switched(is_on),
        }
        try:
            reply = await self._client.post(engines, "/tokenize", body)
        except NoReply as error:
            raise JudgeUnavailable(f"no engine said whether its model thinks: {error}") from error
        if reply.status >= 500:
            raise JudgeUnavailable(f"an engine answered {reply.status} when asked whether its model thinks")
        tokens = (reply.body or {}).get("token_strs")
        return "".join(map(str, tokens)).replace(_SPACE, " ") if isinstance(tokens, list) else ""
