"""Prompts rendered to ids by the engine's own template, through vLLM's `/tokenize`.

Knows nothing about hints. Adapters change no template, so the base model's is every version's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clawloop.contracts.turns import Message, TurnRecord
from clawloop.errors import EngineRejected, EngineUnavailable, PromptTooLong
from clawloop.serving.endpoints import Endpoints, JsonClient, NoReply

# Rendering takes milliseconds; a busy engine's event loop, some seconds.
RENDER_SECONDS = 60.0
# What of a chat request shapes its prompt, besides messages and tools.
_SHAPING = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template_kwargs")


class EngineRenderer:
    """Satisfies `activities.judging.ports.Renderer`. Use as an async context manager."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._client = JsonClient(RENDER_SECONDS)

    async def __aenter__(self) -> EngineRenderer:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    async def render(self, turn: TurnRecord, messages: Sequence[Message]) -> list[int]:
        """The ids of a prompt with these messages, otherwise as the turn's.

        Raises:
            EngineUnavailable: ask again later.
            EngineRejected: the engine cannot render these.
            PromptTooLong: they and the turn's reply do not fit into its context.
        """
        body: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": True}
        body |= {name: turn.sampling[name] for name in _SHAPING if name in turn.sampling}
        # In vLLM's prompts they stand whatever `tool_choice` says; an engine told to leave them out gives other ids.
        if turn.tools is not None:
            body["tools"] = turn.tools
        try:
            reply = await self._client.post(self._endpoints(turn.policy), "/tokenize", body)
        except NoReply as error:
            raise EngineUnavailable(f"no engine rendered a prompt: {error}") from error
        if reply.status >= 500:
            raise EngineUnavailable(f"an engine answered {reply.status} when asked to render a prompt")
        said = reply.body or {}
        tokens, context = said.get("tokens"), said.get("max_model_len")
        if reply.status != 200 or not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise EngineRejected(reply.status, {"message": "it does not render this prompt"})
        # vLLM renders a prompt of any length here, and says beside it what a chat may have.
        length = len(tokens) + len(turn.response_ids or ())
        if isinstance(context, int) and length > context:
            raise PromptTooLong(f"{length} tokens with the reply, the context holds {context}")
        return tokens
