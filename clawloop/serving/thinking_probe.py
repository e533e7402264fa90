"""Asks engines how their model thinks: `/tokenize` renders a chat by the engine's own template."""

from __future__ import annotations

from typing import Any

from clawloop.errors import JudgeUnavailable
from clawloop.families.thinking import Thinking, switched, thinking_of
from clawloop.serving.endpoints import Endpoint, Endpoints, JsonClient, NoReply

# Rendering takes milliseconds; a busy engine's event loop, some seconds.
_SECONDS = 60.0
_CHAT = [{"role": "user", "content": "Hello"}]
_REFUSED = (400, 422)
_NO_ROUTE = (404, 405)
# A space as byte-level tokenizers write it.
_SPACE = "\u0120"


class ThinkingProbe:
    """Use as an async context manager.

    Each model is asked about until an answer is certain, and again when its engines are others.
    """

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
        """The thinking mode of a policy's base model; NEVER for a server that does not render chats.

        Raises:
            JudgeUnavailable: no engine answered.
        """
        engines = tuple(self._endpoints(policy))
        if (known := self._known.get(engines)) is not None:
            return known
        (on, is_certain), (off, is_certain_too) = [await self._rendered(engines, is_on) for is_on in (True, False)]
        found = thinking_of(on, off)
        if is_certain and is_certain_too:
            self._known[engines] = found
        return found

    async def _rendered(self, engines: tuple[Endpoint, ...], is_on: bool) -> tuple[str, bool]:
        """The chat as the engine renders it, empty if it does not; whether it would say the same again."""
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
        if reply.status not in (200, *_REFUSED, *_NO_ROUTE):
            raise JudgeUnavailable(f"an engine answered {reply.status} when asked whether its model thinks")
        if reply.status != 200:
            # A proxy has no route while its engine starts; a field that the server does not know it never will.
            named = reply.status in _REFUSED and any(name in str(reply.body) for name in body)
            return "", named
        tokens = (reply.body or {}).get("token_strs")
        return ("".join(map(str, tokens)).replace(_SPACE, " ") if isinstance(tokens, list) else ""), True
