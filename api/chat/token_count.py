"""Number of tokens in a request's prompt, by the engine's own template.

An engine splits all texts into tokens on one thread, which chats need too. So the counting for a key is bounded, and
done one request after the other.
"""

from __future__ import annotations

from typing import Any

import orjson

from api.chat.bounds import check_bounds, check_counted
from api.chat.forced_tools import tools_for_engine
from api.chat.models import resolve_model
from api.chat.sent import sent_to
from api.dependencies import Services
from clawloop.contracts.serving import ApiKey, RouteKey
from clawloop.errors import EngineAnswerUnusable, RequestRejected

_PROMPT_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def count_tokens(services: Services, key: ApiKey, chat: dict[str, Any]) -> int:
    """The tokens of a chat request's prompt.

    Raises:
        RequestRejected: the model's name stands for nothing, `chat_template_kwargs` is no object, the request exceeds a
            bound, or its key a limit.
        EngineAnswerUnusable, EngineBroke, EngineRejected, EngineUnavailable
    """
    check_bounds(chat, services.limits.chat)
    check_counted(chat, services.limits.chat)
    own = chat.get("chat_template_kwargs")
    if own is not None and not isinstance(own, dict):
        raise RequestRejected(
            "`chat_template_kwargs`: input should be an object.", code="invalid_value", field="chat_template_kwargs"
        )
    policy, _ = await resolve_model(chat["model"], key, services.directory)
    # Adapters do not change the template, so the base model counts for all versions.
    prompt: dict[str, Any] = {name: chat[name] for name in _PROMPT_FIELDS if name in chat}
    if "tools" in prompt:
        prompt["tools"] = tools_for_engine(chat)
    if (effort := chat.get("reasoning_effort")) is not None:
        # As vLLM fills it in for a chat.
        prompt["chat_template_kwargs"] = {"reasoning_effort": effort, "enable_thinking": effort != "none"} | (own or {})
    route = RouteKey(policy.id, 0, policy.base_model, affinity=str(key.id))
    async with (
        services.key_limits.admit_count(key),
        services.engines.open_chat(
            route, lambda model: orjson.dumps(sent_to(model, prompt).body | {"model": policy.base_model}), "/tokenize"
        ) as answer,
    ):
        raw = await answer.body()
    try:
        count = orjson.loads(raw)["count"]
    except (orjson.JSONDecodeError, LookupError, TypeError) as error:
        raise EngineAnswerUnusable(f"it has no count of tokens ({type(error).__name__})") from error
    if not isinstance(count, int):
        raise EngineAnswerUnusable("its count of tokens is no number")
    return count
