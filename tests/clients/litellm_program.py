"""What LiteLLM gets from a gateway, as JSON. Runs with LiteLLM's packages alone; arguments: address, key."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

litellm: Any = import_module("litellm")

url, key = sys.argv[1:]
TOOL = {
    "type": "function",
    "function": {"name": "exec", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}


def chat(session: str, *said: Any, **options: Any) -> Any:
    messages = [{"role": "user", "content": one} if isinstance(one, str) else one for one in said]
    wire = {"model": "openai/policy", "api_base": f"{url}/v1"} | options
    return litellm.completion(
        messages=messages, api_key=key, max_retries=0, extra_headers={"X-Session-Id": session}, **wire
    )


def calls_of(message: Any) -> list[Any]:
    return [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls or []]


def main() -> dict[str, Any]:
    whole = chat("whole", "hello")
    streamed = list(chat("stream", "hello", stream=True))
    called = chat("tools", "use a TOOL", tools=[TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "done"}
    answered = chat("tools", "use a TOOL", called.model_dump(exclude_none=True), result, tools=[TOOL])
    parts = list(chat("tool stream", "use a TOOL", tools=[TOOL], stream=True))
    joined = litellm.stream_chunk_builder(parts)
    anthropic = {"model": "anthropic/policy", "api_base": url, "max_tokens": 100}
    message = chat("anthropic", "hello", **anthropic)
    message_parts = list(chat("anthropic stream", "hello", stream=True, **anthropic))
    try:
        chat("error", "hello", model="openai/none")
        error = None
    except Exception as failed:  # noqa: BLE001  which one it is, is what is tested
        error = [type(failed).__name__, getattr(failed, "status_code", None)]
    return {
        "whole": whole.choices[0].message.content,
        "usage": whole.usage.completion_tokens,
        "streamed": "".join(part.choices[0].delta.content or "" for part in streamed),
        "chunks": len(streamed),
        "calls": calls_of(called),
        "answered": answered.choices[0].message.content,
        "streamed calls": calls_of(joined.choices[0].message),
        "anthropic": message.choices[0].message.content,
        "anthropic streamed": "".join(part.choices[0].delta.content or "" for part in message_parts),
        "error": error,
    }


print(json.dumps(main()))  # noqa: T201
