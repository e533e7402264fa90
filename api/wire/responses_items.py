"""The items of OpenAI's Responses: from those of a request to chat messages.

What a chat request has no word for is kept as text that a model can read, so that no history ends a session. Refused is
what the reply would be wrong without: items and files that are stored elsewhere.
"""

from __future__ import annotations

import base64
import re
from typing import Any, NamedTuple

import orjson

from api.wire.reading import kept, objects, text, wrong
from api.wire.responses_tools import INPUT, SEARCH, ResponsesTools
from clawloop.contracts.turns import Message

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_FILE = re.compile(
    r"data:(?:text/[\w.+-]+|application/(?:json|xml|yaml))(?:;charset=utf-8)?;base64,", re.IGNORECASE
)
# Calls of tools that clients and servers run, as a function's name and what its arguments are read from.
_CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tool_search_call": (SEARCH, ("arguments",)),
    "local_shell_call": ("local_shell", ("action",)),
    "shell_call": ("shell", ("action",)),
    "apply_patch_call": ("apply_patch", ("operation",)),
    "computer_call": ("computer", ("action", "actions")),
    "program": ("program", ("code",)),
    "code_interpreter_call": ("code_interpreter", ("code",)),
    "file_search_call": ("file_search", ("queries",)),
    "mcp_call": ("mcp", ("arguments",)),
}
# Results that are in the item of their call.
_RESULTS = {
    "code_interpreter_call": ("outputs",),
    "file_search_call": ("results",),
    "mcp_call": ("output", "error"),
}
_REFUSED = {
    "item_reference": "items are not stored: send the item itself, or `previous_response_id`",
    "compaction_trigger": "conversations are not compacted here. Ask for a summary in a message",
}
_UNREADABLE_SUMMARY = "[compaction] What was said before was summarised elsewhere, in a form that cannot be read here."


def messages_of(
    items: Any, calls: set[str], tools: ResponsesTools | None = None, ignored: list[str] | None = None
) -> list[Message]:
    """What the items say, as messages.

    Args:
        calls: ids of the calls in the conversation before; those of the items are added.
        tools: of the request; gets those that items bring.
        ignored: gets the names of items that are left out.

    Raises:
        RequestRejected: names the item and the remedy.
    """
    tools = ResponsesTools() if tools is None else tools
    ignored = [] if ignored is None else ignored
    messages = _Messages()
    for item, place in objects(items, "input"):
        _add_item(messages, item, place, _Around(calls, tools, ignored))
    for message in messages.done:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # thinking alone
    return messages.done


class _Around(NamedTuple):
    """What items are read with, and add to."""

    calls: set[str]
    tools: ResponsesTools
    ignored: list[str]


def _add_item(messages: _Messages, item: dict[str, Any], place: str, around: _Around) -> None:
    kind = item.get("type") or "message"
    match kind:
        case "message":
            messages.add(_message(item, place))
        case "reasoning":
            messages.add_reasoning(_reasoning(item, place))
        case "function_call" | "custom_tool_call":
            messages.add_call(_call(item, kind, place, around.tools), around.calls)
        case "additional_tools":
            around.tools.load(item.get("tools") or [], f"{place}.tools", around.ignored)
        case "tool_search_output":
            messages.add(_search_output(item, place, around))
        case str() if kind in _CALLS:
            _add_other_call(messages, item, kind, place, around.calls)
        case str() if kind.endswith("_output"):
            messages.add(_output(item, kind, place, around.calls))
        case _:
            _add_other(messages, item, str(kind), place, around.ignored)


class _Messages:
    """Joins the items of one reply: thinking, text and calls are one message of the assistant."""

    def __init__(self) -> None:
        self.done: list[Message] = []

    def add(self, message: Message) -> None:
        last = self.done[-1] if self.done else {}
        begun = message["role"] == "assistant" == last.get("role")
        if begun and last.get("content") is None and "tool_calls" not in last:
            last["content"] = message["content"]
        else:
            self.done.append(message)

    def add_reasoning(self, thought: str) -> None:
        message: Message = {"role": "assistant", "content": None}
        if thought:
            message["reasoning_content"] = thought
        self.done.append(message)

    def add_call(self, call: dict[str, Any], known: set[str]) -> None:
        known.add(call["id"])
        if not self.done or self.done[-1]["role"] != "assistant":
            self.done.append({"role": "assistant", "content": None})
        calls = self.done[-1].setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append(call)


def _message(item: dict[str, Any], place: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{place}.role", f"{str(role)[:40]!r} is not one of {', '.join(_ROLES)}")
    content = item.get("content")
    if isinstance(content, str) or (content is None and role == "assistant"):
        return {"role": _ROLES[role], "content": content or ""}
    parts = _parts(content, f"{place}.content")
    if all(part["type"] == "text" for part in parts):
        texts = [part["text"] for part in parts]
        return {"role": _ROLES[role], "content": texts[0] if len(texts) == 1 else "".join(texts)}
    return {"role": _ROLES[role], "content": parts}  # type: ignore[dict-item]


def _parts(content: Any, place: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for part, at in objects(content, place):
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str(said)}:
                parts.append({"type": "text", "text": said})
            case {"type": "refusal", "refusal": str(said)}:
                parts.append({"type": "text", "text": said})
            case {"type": "input_image", "image_url": str(url)}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": "input_text" | "output_text" | "text" | "refusal"}:
                raise wrong(at, "its text should be a string")
            case {"type": "computer_screenshot", "image_url": str(url)}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": "input_image"}:
                raise wrong(f"{at}.image_url", "an image is given by `image_url`; there are no stored files")
            case {"type": "input_file"}:
                parts.append({"type": "text", "text": _file_text(part, at)})
            case {"type": "input_audio"} | {"type": "input_video"}:
                raise wrong(f"{at}.type", "it is not supported here; these are: input_text, input_image, input_file")
            case {"type": str(), "text": str(said)}:
                parts.append({"type": "text", "text": said})
            case {"type": str()}:
                parts.append({"type": "text", "text": kept(part, at)})
            case _:
                raise wrong(f"{at}.type", "input should be a string")
    return parts


def _file_text(part: dict[str, Any], place: str) -> str:
    """The text of a file that is one, after its name."""
    match = _TEXT_FILE.match(data) if isinstance(data := part.get("file_data"), str) else None
    if match is not None:
        assert isinstance(data, str)
        try:
            said = base64.b64decode(data[match.end() :], validate=True).decode()
        except ValueError:
            raise wrong(f"{place}.file_data", "it should be UTF-8 text in base64") from None
        name = part.get("filename")
        # Parts that are text are joined as they are.
        return f"\n{name}\n{said}\n" if isinstance(name, str) and name else f"\n{said}\n"
    raise wrong(
        f"{place}.type",
        "engines read text and images, no PDF or other file, and there are no stored files. Send the text of the file "
        "as `input_text`, or as `file_data` with `data:text/plain;base64,…`, or its pages as `input_image`",
    )


def _reasoning(item: dict[str, Any], place: str) -> str:
    texts = [
        text(part.get("text"), f"{at}.text")
        for name in ("content", "summary")
        for part, at in objects(item.get(name) or [], f"{place}.{name}")
    ]
    return "".join(texts)


def _call(item: dict[str, Any], kind: str, place: str, tools: ResponsesTools) -> dict[str, Any]:
    name = tools.function_name(text(item.get("name"), f"{place}.name"), item.get("namespace"))
    if kind == "custom_tool_call":
        arguments = orjson.dumps({INPUT: text(item.get("input"), f"{place}.input")}).decode()
    else:
        has_none = "arguments" in item and item["arguments"] is None
        arguments = "{}" if has_none else text(item.get("arguments"), f"{place}.arguments")
    return _function_call(text(item.get("call_id"), f"{place}.call_id"), name, arguments)


def _function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _add_other_call(messages: _Messages, item: dict[str, Any], kind: str, place: str, calls: set[str]) -> None:
    """A call of a tool with a form of its own; with its result, if it has one; as text if it has no id."""
    name, fields = _CALLS[kind]
    results = _RESULTS.get(kind, ())
    # Clients that run a shell by themselves give back the call's id; what a server ran has no other one.
    call_id = item.get("call_id") or (item.get("id") if results else None)
    if not isinstance(call_id, str):
        messages.add({"role": "assistant", "content": kept(item, place)})
        return
    given = {field: item[field] for field in fields if item.get(field) is not None}
    only = given[fields[0]] if list(given) == [fields[0]] else None
    if isinstance(only, str) and kind == "mcp_call":
        arguments = only
    else:
        arguments = orjson.dumps(only if isinstance(only, dict) else given).decode()
    if kind == "mcp_call":
        name = f"{item.get('server_label')}__{item.get('name')}"
    messages.add_call(_function_call(call_id, name, arguments), calls)
    if results:
        said = [item[field] for field in results if item.get(field) is not None]
        content = "\n".join(value if isinstance(value, str) else orjson.dumps(value).decode() for value in said)
        messages.add({"role": "tool", "tool_call_id": call_id, "content": content})


def _search_output(item: dict[str, Any], place: str, around: _Around) -> Message:
    """What a search of tools found, which is shown to the model from now on."""
    loaded = around.tools.load(item.get("tools") or [], f"{place}.tools", around.ignored)
    said = f"Tools loaded: {', '.join(loaded)}" if loaded else "No tools found."
    call = item.get("call_id")
    if isinstance(call, str) and call in around.calls:
        return {"role": "tool", "tool_call_id": call, "content": said}
    return {"role": "user", "content": f"[tool_search_output] {said}"}


def _add_other(messages: _Messages, item: dict[str, Any], kind: str, place: str, ignored: list[str]) -> None:
    """What is neither said nor called.

    Raises:
        RequestRejected: the reply would be wrong without it.
    """
    if kind in _REFUSED:
        raise wrong(place, _REFUSED[kind])
    if kind == "configuration_update":
        ignored.append(f"{place}.{kind}")
    elif kind == "compaction":
        messages.add({"role": "user", "content": _UNREADABLE_SUMMARY})
    elif item.get("role") in _ROLES and isinstance(item.get("content"), str | list):
        messages.add(_message(item, place))
    else:
        by_model = kind.endswith(("_call", "_request", "_list_tools"))
        messages.add({"role": "assistant" if by_model else "user", "content": kept(item, place)})


def _output(item: dict[str, Any], kind: str, place: str, calls: set[str]) -> Message:
    # `local_shell_call_output` has its call's id as its own.
    call = item.get("call_id") or (item.get("id") if kind == "local_shell_call_output" else None)
    output = item.get("output") if item.get("output") is not None else item.get("result")
    if call is None or (call not in calls and kind not in _STRICT):
        return {"role": "user", "content": kept(item | {"output": output}, place)}
    call = text(call, f"{place}.call_id")
    if call not in calls:
        raise wrong(
            f"{place}.call_id",
            "no call before it has this id. Send the call before its result",
        )
    content = _output_content(output, kind, place)
    return {"role": "tool", "tool_call_id": call, "content": content}


# Their results without a call are a client's mistake, and the model could not know what they answer.
_STRICT = ("function_call_output", "custom_tool_call_output")


def _output_content(output: Any, kind: str, place: str) -> Any:
    if output is None or isinstance(output, str):
        return output or ""
    if kind == "shell_call_output":  # a list of outputs and exit codes
        return orjson.dumps(output).decode()
    parts = _parts([output] if isinstance(output, dict) else output, f"{place}.output")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
