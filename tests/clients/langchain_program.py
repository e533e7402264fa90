"""What LangChain gets from a gateway, as JSON. Runs with LangChain's packages alone; arguments: address, key."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

ChatOpenAI: Any = import_module("langchain_openai").ChatOpenAI
messages: Any = import_module("langchain_core.messages")

url, key = sys.argv[1:]
TOOL = {
    "name": "exec",
    "description": "run a command",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def model(session: str, **options: Any) -> Any:
    headers = {"X-Session-Id": session}
    return ChatOpenAI(
        model="policy", base_url=f"{url}/v1", api_key=key, max_retries=0, default_headers=headers, **options
    )


def main() -> dict[str, Any]:
    whole = model("whole").invoke("hello")
    streamed = list(model("stream").stream("hello"))
    agent = model("tools").bind_tools([TOOL])
    asked = messages.HumanMessage("use a TOOL")
    called = agent.invoke([asked])
    answered = agent.invoke([asked, called, messages.ToolMessage("done", tool_call_id=called.tool_calls[0]["id"])])
    parts = list(model("tool stream").bind_tools([TOOL]).stream([asked]))
    joined = parts[0]
    for part in parts[1:]:
        joined += part
    responses = model("responses", use_responses_api=True).invoke("hello")
    try:
        ChatOpenAI(model="none", base_url=f"{url}/v1", api_key=key, max_retries=0).invoke("hello")
        error = None
    except Exception as failed:  # noqa: BLE001  which one it is, is what is tested
        error = [type(failed).__name__, getattr(failed, "code", None)]
    return {
        "whole": whole.content,
        "usage": whole.usage_metadata["output_tokens"],
        "streamed": "".join(part.content for part in streamed),
        "chunks": len(streamed),
        "calls": [[call["name"], call["args"]] for call in called.tool_calls],
        "answered": answered.content,
        "streamed calls": [[call["name"], call["args"]] for call in joined.tool_calls],
        "responses": responses.text if isinstance(responses.text, str) else responses.text(),
        "error": error,
    }


print(json.dumps(main()))  # noqa: T201
