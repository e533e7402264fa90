"""Tools of a forced call: without `strict`, engines let it have any arguments, such as `true`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tools_for_engine(chat: Mapping[str, Any]) -> Any:
    """The tools of a chat request as the engine gets them: as they came, unless a call is forced.

    The form of such a reply is the client's anyway, so it is not trained; with `tool_choice` auto a grammar would keep
    every reply from it. A tool that says `strict: false` stays free.
    """
    tools = chat.get("tools")
    if not isinstance(tools, list) or chat.get("tool_choice") in (None, "auto", "none"):
        return tools
    return [_strict(tool) for tool in tools]


def _strict(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("parameters"), dict):
        return tool
    if function.get("strict") is not None:
        return tool
    return tool | {"function": function | {"strict": True}}
