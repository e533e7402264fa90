"""Brings what clients send carelessly into the form that it means, so that no engine refuses it."""

from __future__ import annotations

from typing import Any

import orjson

from clawloop.core.errors import RequestRejected

_NO_TOOL = ("auto", "none")


def take_as_meant(body: dict[str, Any]) -> None:
    """Change a chat request in place, before it is checked; what has another type than it should stays as it is.

    Raises:
        RequestRejected: 400; a call is wanted and there are no tools.
    """
    if not body.get("tools"):
        _without_tools(body)
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            _message(message)


def _without_tools(body: dict[str, Any]) -> None:
    if body.get("tools") is None or body["tools"] == []:
        body.pop("tools", None)
        choice = body.get("tool_choice")
        if choice in (*_NO_TOOL, None):
            body.pop("tool_choice", None)
        elif choice == "required" or isinstance(choice, dict):
            message = "`tool_choice`: a call is wanted and `tools` has none. Send tools, or leave it out."
            raise RequestRejected(message, code="invalid_value", field="tool_choice")


def _message(message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if "content" in message and message["content"] is None and not calls:
        message["content"] = ""
    if not calls:
        message.pop("tool_calls", None)
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            function["arguments"] = "{}"
        elif isinstance(arguments, dict):
            function["arguments"] = orjson.dumps(arguments).decode()
