"""The items of OpenAI's Responses: from those of a request to chat messages."""

from __future__ import annotations

import base64
import re
from typing import Any

from api.wire.reading import objects, text, wrong
from clawloop.contracts.turns import Message

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_FILE = re.compile(
    r"data:(?:text/[\w.+-]+|application/(?:json|xml|yaml))(?:;charset=utf-8)?;base64,", re.IGNORECASE
)
_KNOWN = "message, reasoning, function_call, function_call_output"


def messages_of(items: Any, calls: set[str]) -> list[Message]:
    """What the items say, as messages.

    Args:
        calls: ids of the calls in the conversation before; those of the items are added.

    Raises:
        RequestRejected: names the item and the remedy.
    """
    messages = _Messages()
    for item, place in objects(items, "input"):
        match item.get("type", "message"):
            case "message":
                messages.add(_message(item, place))
            case "reasoning":
                messages.add_reasoning(_reasoning(item, place))
            case "function_call":
                call = _call(item, place)
                calls.add(call["id"])
                messages.add_call(call)
            case "function_call_output":
                messages.add(_output(item, place, calls))
            case "item_reference":
                raise wrong(place, "items are not stored: send the item itself, or `previous_response_id`")
            case other:
                raise wrong(f"{place}.type", f"{str(other)[:60]!r} is not supported here; these are: {_KNOWN}")
    for message in messages.done:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # thinking alone
    return messages.done


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

    def add_call(self, call: dict[str, Any]) -> None:
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
    if isinstance(content, str):
        return {"role": _ROLES[role], "content": content}
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
            case {"type": "input_image"}:
                raise wrong(f"{at}.image_url", "an image is given by `image_url`; there are no stored files")
            case {"type": "input_file"}:
                parts.append({"type": "text", "text": _file_text(part, at)})
            case _:
                found = str(part.get("type"))[:60]
                raise wrong(
                    f"{at}.type", f"{found!r} is not supported here; these are: input_text, input_image, input_file"
                )
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


def _call(item: dict[str, Any], place: str) -> dict[str, Any]:
    function = {
        "name": text(item.get("name"), f"{place}.name"),
        "arguments": text(item.get("arguments"), f"{place}.arguments"),
    }
    return {"id": text(item.get("call_id"), f"{place}.call_id"), "type": "function", "function": function}


def _output(item: dict[str, Any], place: str, calls: set[str]) -> Message:
    call = text(item.get("call_id"), f"{place}.call_id")
    if call not in calls:
        raise wrong(
            f"{place}.call_id",
            "no `function_call` before it has this id. Send the call before its result",
        )
    output = item.get("output")
    if isinstance(output, str):
        return {"role": "tool", "tool_call_id": call, "content": output}
    parts = _parts(output, f"{place}.output")
    if all(part["type"] == "text" for part in parts):
        return {"role": "tool", "tool_call_id": call, "content": "".join(part["text"] for part in parts)}
    return {"role": "tool", "tool_call_id": call, "content": parts}  # type: ignore[dict-item]
