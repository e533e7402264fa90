"""Asks engines about prompts: their token ids, the text of tokens, and how the model thinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clawloop.core.contracts.turns import Message, TurnRecord
from clawloop.core.errors import (
    EngineAnswerUnusable,
    EngineRejected,
    EngineUnavailable,
    JudgeUnavailable,
    PromptTooLong,
)
from clawloop.core.families.template import Thinking, switched, thinking_of
from clawloop.core.lessons.prompt import turn_as_sent
from clawloop.serving.endpoints import Asking, Endpoint, Endpoints, JsonClient, NoReply

# Rendering ------------------------------------------------------------------------------------------------------------
# Renders prompts to token ids by the engine's chat template, through vLLM's `/tokenize`.
#
# Adapters do not change the template, so the base model's serves all versions.

# Rendering takes milliseconds; a busy engine's event loop, some seconds.
RENDER_SECONDS = 60.0
# Fields of a chat request that shape its prompt, besides messages and tools.
_PROMPT_FIELDS = ("add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template_kwargs")


class EngineRenderer(Asking):
    """Renders prompts as `activities.judging.evaluation.Render` says."""

    def __init__(self, endpoints: Endpoints) -> None:
        super().__init__(JsonClient(RENDER_SECONDS))
        self._endpoints = endpoints

    async def render(self, turn: TurnRecord, messages: Sequence[Message]) -> list[int]:
        """The ids of the turn's prompt with these messages in place of its own, as the engine would have got them.

        Raises:
            EngineUnavailable: try again later.
            EngineRejected: the engine cannot render these messages.
            PromptTooLong: the prompt and the turn's reply do not fit into the engine's context.
        """
        body: dict[str, Any] = {"messages": list(turn_as_sent(turn, messages)), "add_generation_prompt": True}
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


# Token texts ----------------------------------------------------------------------------------------------------------
# The text of each token, from an engine: what a plain completion says of its prompt.
#
# `/detokenize` joins the texts, and no route of vLLM takes them one by one. A token that is part of a character has
# the replacement character as its text.

PATH = "/v1/completions"


def texts_request(ids: Sequence[int]) -> dict[str, Any]:
    """The body that asks for the texts of these ids, without the model; there must be one at least."""
    # vLLM says nothing of a prompt's first token, so that is there twice.
    return {"prompt": [ids[0], *ids], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "stream": False}


def texts_of(answer: object, ids: Sequence[int]) -> list[str]:
    """The texts in an engine's answer to `texts_request`.

    Raises:
        EngineAnswerUnusable: it has not the text of each token.
    """
    try:
        places = answer["choices"][0]["prompt_logprobs"][1:]  # type: ignore[index]
        texts = [place[str(token)]["decoded_token"] for place, token in zip(places, ids, strict=True)]
    except (LookupError, TypeError, ValueError) as error:
        raise EngineAnswerUnusable(f"it has not the text of each token ({type(error).__name__})") from error
    if not all(isinstance(text, str) for text in texts):
        raise EngineAnswerUnusable("the text of a token is no text")
    return texts


# Thinking -------------------------------------------------------------------------------------------------------------
# Asks engines how their model thinks: `/tokenize` renders a chat by the engine's own template.

_CHAT = [{"role": "user", "content": "Hello"}]
_REFUSED = (400, 422)
_NO_ROUTE = (404, 405)
# A space as byte-level tokenizers write it.
_SPACE = "\u0120"


class ThinkingProbe(Asking):
    """Asks about each model until an answer is certain, and again when its engines are others."""

    def __init__(self, endpoints: Endpoints) -> None:
        super().__init__(JsonClient(RENDER_SECONDS))
        self._endpoints = endpoints
        self._known: dict[tuple[Endpoint, ...], Thinking] = {}

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
        """The chat as the engine renders it, empty if it renders none; True if the answer is final."""
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
