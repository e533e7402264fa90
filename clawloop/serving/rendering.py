"""Renders prompts to token ids by the engine's chat template, through vLLM's `/tokenize`.

Adapters do not change the template, so the base model's serves all versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clawloop.contracts.turns import Message, TurnRecord
from clawloop.errors import EngineRejected, EngineUnavailable, PromptTooLong
from clawloop.families.orders import SENT_BY, as_sent
from clawloop.serving.endpoints import Endpoints, JsonClient, NoReply

# Rendering takes milliseconds; a busy engine's event loop, some seconds.
RENDER_SECONDS = 60.0
# Fields of a chat request that shape its prompt, besides messages and tools.
_PROMPT_FIELDS = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template_kwargs")


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
        """The ids of the turn's prompt with these messages in place of its own, in the order that they are sent in.

        Raises:
            EngineUnavailable: try again later.
            EngineRejected: the engine cannot render these messages.
            PromptTooLong: the prompt and the turn's reply do not fit into the engine's context.
        """
        rules = turn.sampling.get(SENT_BY)
        sent = as_sent(messages, rules if isinstance(rules, list) else ())  # type: ignore[arg-type]
        body: dict[str, Any] = {"messages": list(sent), "add_generation_prompt": True}
        body |= {name: turn.sampling[name] for name in _PROMPT_FIELDS if name in turn.sampling}
        # vLLM puts tools into the prompt whatever `tool_choice` is, unless it was started to leave them out.
        if turn.tools is not None:
            body["tools"] = turn.tools
        try:
            reply = await self._client.post(self._endpoints(turn.policy), "/tokenize", body)
        except NoReply as error:
            raise EngineUnavailable(f"no engine rendered a prompt: {error}") from error
        if reply.status >= 500:
            raise EngineUnavailable(f"an engine answered {reply.status} when asked to render a prompt")
        answer = reply.body or {}
        tokens, context = answer.get("tokens"), answer.get("max_model_len")
        if reply.status != 200 or not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise EngineRejected(reply.status, {"message": "the engine cannot render this prompt"})
        # `/tokenize` renders a prompt of any length, and reports the limit of a chat.
        length = len(tokens) + len(turn.response_ids or ())
        if isinstance(context, int) and length > context:
            raise PromptTooLong(f"{length} tokens with the reply, the context holds {context}")
        return tokens
