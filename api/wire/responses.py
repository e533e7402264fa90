"""OpenAI's Responses: its request to a chat request, and a chat completion to its answer."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import BaseModel, ConfigDict, Field

from api.errors import CONTEXT_OVERFLOW, Problem
from api.json_bounds import Objects, Texts
from api.wire.reading import (
    PASSED_ON,
    Translated,
    Unreadable,
    blocks,
    kept,
    last_of_user,
    named,
    objects,
    parse,
    text,
    unused,
    wrong,
)
from api.wire.reply import Chunk, TokenCounts, event, usage_of
from api.wire.responses_tools import INPUT, SEARCH, Origin, ResponsesTools, arguments_of, given_again, input_of
from clawloop.core.contracts.turns import Message
from clawloop.core.errors import EngineAnswerUnusable, RequestRejected

# Items ----------------------------------------------------------------------------------------------------------------
# The items of OpenAI's Responses: from those of a request to chat messages.
#
# What a chat request has no word for is kept as text that a model can read, so that no history ends a session. Refused
# is what the reply would be wrong without: items and files that are stored elsewhere.

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
    """The items as messages.

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
    last = last_of_user(items)
    for index, (item, place) in enumerate(objects(items, "input")):
        _add_item(messages, item, place, _Around(calls, tools, Unreadable(ignored, earlier=index < last)))
    for message in messages.done:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""  # thinking alone
    return messages.done


class _Around(NamedTuple):
    """State that reading items uses and extends."""

    calls: set[str]
    tools: ResponsesTools
    unreadable: Unreadable

    @property
    def ignored(self) -> list[str]:
        return self.unreadable.ignored


def _add_item(messages: _Messages, item: dict[str, Any], place: str, around: _Around) -> None:
    kind = item.get("type") or "message"
    match kind:
        case "message":
            messages.add(_message(item, place, around.unreadable))
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
            messages.add(_output(item, kind, place, around))
        case _:
            _add_other(messages, item, str(kind), place, around)


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


def _message(item: dict[str, Any], place: str, unreadable: Unreadable) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{place}.role", f"{str(role)[:40]!r} is not one of {', '.join(_ROLES)}")
    content = item.get("content")
    if content is None or isinstance(content, str):
        return {"role": _ROLES[role], "content": content or ""}
    parts = _parts(content, f"{place}.content", unreadable)
    if all(part["type"] == "text" for part in parts):
        texts = [part["text"] for part in parts]
        return {"role": _ROLES[role], "content": texts[0] if len(texts) == 1 else "".join(texts)}
    return {"role": _ROLES[role], "content": parts}  # type: ignore[dict-item]


def _parts(content: Any, place: str, unreadable: Unreadable) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for part, at in blocks(content, place):
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
                refused = wrong(f"{at}.image_url", "an image is given by `image_url`; there are no stored files")
                line = unreadable.line("input_image", part.get("file_id"), at, refused)
                parts.append({"type": "text", "text": f"\n{line}\n"})
            case {"type": "input_file"}:
                parts.append({"type": "text", "text": _file_text(part, at, unreadable)})
            case {"type": "input_audio" | "input_video" as kind}:
                supported = "it is not supported here; these are: input_text, input_image, input_file"
                line = unreadable.line(kind, None, at, wrong(f"{at}.type", supported))
                parts.append({"type": "text", "text": f"\n{line}\n"})
            case {"type": str(), "text": str(said)}:
                parts.append({"type": "text", "text": said})
            case {"type": str()}:
                parts.append({"type": "text", "text": kept(part, at)})
            case _:
                raise wrong(f"{at}.type", "input should be a string")
    return parts


def _file_text(part: dict[str, Any], place: str, unreadable: Unreadable) -> str:
    """The text of a file that is one, after its name."""
    name = part.get("filename")
    match = _TEXT_FILE.match(data) if isinstance(data := part.get("file_data"), str) else None
    refused = wrong(
        f"{place}.type",
        "engines read text and images, no PDF or other file, and there are no stored files. Send the text of the file "
        "as `input_text`, or as `file_data` with `data:text/plain;base64,…`, or its pages as `input_image`",
    )
    if match is not None:
        assert isinstance(data, str)
        try:
            said = base64.b64decode(data[match.end() :], validate=True).decode()
        except ValueError:
            refused = wrong(f"{place}.file_data", "it should be UTF-8 text in base64")
        else:
            # Parts that are text are joined as they are.
            return f"\n{name}\n{said}\n" if isinstance(name, str) and name else f"\n{said}\n"
    return f"\n{unreadable.line('input_file', name or part.get('file_id'), place, refused)}\n"


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
        given = item.get("arguments")
        if given is None and "arguments" in item:
            given = {}
        arguments = orjson.dumps(given).decode() if isinstance(given, dict) else text(given, f"{place}.arguments")
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
    """The result of a search of tools as a message; its tools are shown to the model from now on."""
    loaded = around.tools.load(item.get("tools") or [], f"{place}.tools", around.ignored)
    said = f"Tools loaded: {', '.join(loaded)}" if loaded else "No tools found."
    call = item.get("call_id")
    if isinstance(call, str) and call in around.calls:
        return {"role": "tool", "tool_call_id": call, "content": said}
    return {"role": "user", "content": f"[tool_search_output] {said}"}


def _add_other(messages: _Messages, item: dict[str, Any], kind: str, place: str, around: _Around) -> None:
    """Add an item that is neither a message nor a call.

    Raises:
        RequestRejected: the reply would be wrong without it.
    """
    if kind in _REFUSED:
        raise wrong(place, _REFUSED[kind])
    if kind == "configuration_update":
        around.ignored.append(f"{place}.{kind}")
    elif kind == "compaction":
        messages.add({"role": "user", "content": _UNREADABLE_SUMMARY})
    elif item.get("role") in _ROLES and isinstance(item.get("content"), str | list):
        messages.add(_message(item, place, around.unreadable))
    else:
        by_model = kind.endswith(("_call", "_request", "_list_tools"))
        messages.add({"role": "assistant" if by_model else "user", "content": kept(item, place)})


def _output(item: dict[str, Any], kind: str, place: str, around: _Around) -> Message:
    # `local_shell_call_output` has its call's id as its own.
    call = item.get("call_id") or (item.get("id") if kind == "local_shell_call_output" else None)
    output = item.get("output") if item.get("output") is not None else item.get("result")
    if call is None or (call not in around.calls and kind not in _STRICT):
        return {"role": "user", "content": kept(item | {"output": output}, place)}
    call = text(call, f"{place}.call_id")
    if call not in around.calls:
        raise wrong(
            f"{place}.call_id",
            "no call before it has this id. Send the call before its result",
        )
    content = _output_content(output, kind, place, around.unreadable)
    return {"role": "tool", "tool_call_id": call, "content": content}


# Their results without a call are a client's mistake, and the model could not know what they answer.
_STRICT = ("function_call_output", "custom_tool_call_output")


def _output_content(output: Any, kind: str, place: str, unreadable: Unreadable) -> Any:
    if output is None or isinstance(output, str):
        return output or ""
    if kind == "shell_call_output":  # a list of outputs and exit codes
        return orjson.dumps(output).decode()
    if isinstance(output, int | float) or (isinstance(output, dict) and "type" not in output):
        return orjson.dumps(output).decode()  # a result that was not written as text
    parts = _parts([output] if isinstance(output, dict) else output, f"{place}.output", unreadable)
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


# Requests -------------------------------------------------------------------------------------------------------------
# OpenAI's Responses: from its request to a chat request.

_SAME_NAME = (
    "client_metadata",
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "stream",
    "temperature",
    "top_p",
    "user",
)
_USED = frozenset(_SAME_NAME) | {
    "background",
    "conversation",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "previous_response_id",
    "prompt",
    "reasoning",
    "store",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "truncation",
}
# Between the instructions and a developer's message.
_BETWEEN = "\n\n"
_NAMES = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
# Features of OpenAI's servers without which the answer would be another one.
_REFUSED_FIELDS = {
    "background": "replies are not made in the background; ask with `stream` instead",
    "conversation": "there are no stored conversations; use `previous_response_id`",
    "prompt": "there are no stored prompts; send `instructions` and `input`",
}


class ResponsesRequest(BaseModel):
    """The fields of `POST /v1/responses` that the gateway reads."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=256, examples=["policy"])]
    input: Annotated[str | Objects | None, Field(examples=["Hello", [{"role": "user", "content": "Hello"}]])] = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    store: bool | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    include: Texts | None = None
    truncation: str | None = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None


def check(body: dict[str, Any]) -> None:
    """
    Raises:
        RequestRejected: names the field and the remedy.
    """
    parse(ResponsesRequest, body)
    for name, remedy in _REFUSED_FIELDS.items():
        if body.get(name):
            raise RequestRejected(f"`{name}`: {remedy}.", code="unsupported_parameter", field=name)
    if not body.get("input") and not body.get("previous_response_id"):
        raise RequestRejected("`input`: say something.", code="missing_required_parameter", field="input")


def translate_responses(
    body: dict[str, Any], also: Iterable[str], before: list[Message], instructions: int = 0
) -> Translated:
    """Translate a request of OpenAI's Responses to the chat request that asks for the same; `check` has passed.

    Args:
        also: further fields that go to the engine.
        before: the conversation that `previous_response_id` names, its reply included.
        instructions: how many characters at the beginning of its system message are instructions.

    Raises:
        RequestRejected: names the field and the remedy.
    """
    passed = PASSED_ON.union(also)
    ignored = unused(body, _USED | passed)
    ignored += [f"include.{name}" for name in body.get("include") or ()]
    ignored += ["store"] if body.get("store") is False else []
    ignored += ["truncation"] if body.get("truncation") not in (None, "disabled") else []
    chat: dict[str, Any] = {name: body[name] for name in passed if body.get(name) is not None}
    chat |= {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    tools = ResponsesTools()
    tools.declare(body.get("tools") or [], "tools", ignored)
    chat["messages"], instructions = _conversation(body, before, instructions, tools, ignored)
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    _add_tools(chat, tools, body.get("tool_choice"))
    _add_text(chat, body.get("text") or {}, ignored)
    reasoning = body.get("reasoning") or {}
    ignored += unused(reasoning, ("effort",), "reasoning")
    if reasoning.get("effort") is not None:
        chat["reasoning_effort"] = text(reasoning["effort"], "reasoning.effort")
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return Translated(chat, named(ignored), _NAMES, instructions, tools.origins)


def _conversation(
    body: dict[str, Any], before: list[Message], instructions: int, tools: ResponsesTools, ignored: list[str]
) -> tuple[list[Message], int]:
    """The messages, and how many characters at their beginning are instructions.

    New instructions replace those of the conversation before, and nothing else: what else its system message has came
    from a developer. Without new ones the old ones stay.
    """
    messages = list(before)
    if given := body.get("instructions"):
        messages = _without_instructions(messages, instructions)
        messages.insert(0, {"role": "system", "content": given})
        instructions = len(given)
    said = body.get("input") or []
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    messages += messages_of(said, _calls_of(before), tools, ignored)
    # Instructions and a developer's message are one system message: many chat templates know but one.
    while len(messages) > 1 and messages[0].get("role") == messages[1].get("role") == "system":
        first, second = messages[0].get("content"), messages[1].get("content")
        if not isinstance(first, str) or not isinstance(second, str):
            break
        messages[:2] = [{"role": "system", "content": f"{first}{_BETWEEN}{second}"}]
    return messages, instructions


def _without_instructions(messages: list[Message], instructions: int) -> list[Message]:
    content = messages[0].get("content") if instructions and messages else None
    if not isinstance(content, str):
        return messages
    others = content[instructions:].removeprefix(_BETWEEN)
    return [{"role": "system", "content": others}, *messages[1:]] if others else messages[1:]


def _calls_of(messages: Iterable[Message]) -> set[str]:
    found = set()
    for message in messages:
        calls = message.get("tool_calls")
        found |= {str(call.get("id")) for call in calls if isinstance(call, dict)} if isinstance(calls, list) else set()
    return found


def _choice(given: Any) -> Any:
    """The form of Responses, for a choice in that of chat requests or of Messages."""
    match given:
        case "" | {"type": "auto"}:
            return None
        case {"type": "none"}:
            return "none"
        case "any" | {"type": "any" | "required"}:
            return "required"
        case {"type": "function", "function": {"name": name}}:
            return {"type": "function", "name": name}
    return given or None


def _add_tools(chat: dict[str, Any], tools: ResponsesTools, choice: Any) -> None:
    match _choice(choice):
        case None:
            pass
        case "auto" | "none" | "required":
            if tools.functions():
                chat["tool_choice"] = choice
            elif choice == "required":
                raise wrong("tool_choice", "`required` needs `tools` of the type function")
        case {"type": "function" | "custom", "name": str(name)}:
            chat["tool_choice"] = {
                "type": "function",
                "function": {"name": _required(tools, choice.get("namespace"), name)},
            }
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = [
                tools.named(text(tool.get("name"), f"{place}.name"), tool.get("namespace"))
                for tool, place in objects(allowed, "tool_choice.tools")
            ]
            chat["tools"] = tools.functions([name for name in names if name is not None])
            if not chat["tools"]:
                raise wrong("tool_choice.tools", "none of them is a function in `tools`")
            chat["tool_choice"] = mode
        case _:
            raise wrong("tool_choice", "it is auto, none, required, a `function` by `name`, or `allowed_tools`")
    if "tools" not in chat and (functions := tools.functions()):
        chat["tools"] = functions


def _required(tools: ResponsesTools, namespace: Any, name: str) -> str:
    if (function := tools.named(name, namespace)) is None:
        raise wrong("tool_choice.name", f"`tools` has no function {name[:64]!r}")
    return function


def _add_text(chat: dict[str, Any], config: dict[str, Any], ignored: list[str]) -> None:
    ignored += unused(config, ("format",), "text")
    match config.get("format"):
        case None | {"type": "text"}:
            pass
        case dict(empty) if not empty:
            pass
        case {"type": "json_schema", "json_schema": {"schema": dict()}} as in_a_chat:
            chat["response_format"] = {"type": "json_schema", "json_schema": in_a_chat["json_schema"]}
        case {"type": "json_object"}:
            chat["response_format"] = {"type": "json_object"}
        case {"type": "json_schema", "name": str(name), "schema": dict(schema)} as wanted:
            form: dict[str, Any] = {"name": name, "schema": schema}
            form |= {key: wanted[key] for key in ("strict", "description") if key in wanted}
            chat["response_format"] = {"type": "json_schema", "json_schema": form}
        case _:
            raise wrong("text.format", "it is text, json_object, or json_schema with `name` and `schema`")


# Replies --------------------------------------------------------------------------------------------------------------
# OpenAI's Responses: from a chat completion to its answer, streamed or whole.

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_GAVE_UP = ("abort", "error")
_OTHER_CALLS = ("custom_tool_call", "tool_search_call")


class ResponsesReply:
    """
    Args:
        response_id: of the response; the ids of its items are made from it.
        described: what the response repeats of its request, see `describe`.
        origins: tools that are no plain functions, by the name of the function that stands for each.
    """

    streams_overflow = True

    def __init__(
        self, response_id: str, described: Chunk, created_at: float, origins: Mapping[str, Origin] | None = None
    ) -> None:
        self._origins = origins or {}
        self._arguments = ""  # of a call that is no function's, until it is whole
        self._id = response_id
        self._described = described
        self._created_at = int(created_at)
        self._number = 0
        self._usage: Chunk | None = None
        self._finish: str | None = None
        self._model: str | None = None
        self._items: list[Chunk] = []
        self._open: str | None = None  # what the last item is, while it is being written
        self._call_items: set[int] = set()

    def as_chat(self, chunk: Chunk) -> Chunk:
        return chunk

    def whole(self, body: Chunk, counts: TokenCounts) -> Chunk:
        choice = body["choices"][0]
        message = choice["message"]
        self._model = body.get("model")
        self._usage = body.get("usage")
        self._finish = choice["finish_reason"]
        if message.get("reasoning_content"):
            self._add_item("reasoning", message["reasoning_content"])
        if message.get("content"):
            self._add_item("message", message["content"])
        for call in message.get("tool_calls") or ():
            item = self._new_call(call["id"], call["function"]["name"])
            _set_arguments(item, call["function"].get("arguments") or "")
            self._items.append(item)
        for item in self._items:
            self._finish_item(item)
        return self._response(counts)

    def part(self, chunk: Chunk, counts: TokenCounts) -> bytes:
        written: list[bytes] = []
        if self._number == 0:
            self._model = chunk.get("model")
            response = self._response(None)
            written += [self._event("response.created", response=response)]
            written += [self._event("response.in_progress", response=response)]
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning_content"):
                written += self._text_delta("reasoning", thought)
            if said := delta.get("content"):
                written += self._text_delta("message", said)
            for call in delta.get("tool_calls") or ():
                written += self._call_delta(call)
            if choice.get("finish_reason") is not None:
                self._finish = choice["finish_reason"]
                written += self._close()
        return b"".join(written)

    def end(self, counts: TokenCounts) -> bytes:
        response = self._response(counts)
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, problem: Problem) -> bytes:
        told = self._event("error", code=str(problem.code), message=problem.message, param=problem.field)
        response = self._response(None) | {
            "status": "failed",
            "error": {
                "code": problem.code if problem.code == CONTEXT_OVERFLOW else "server_error",
                "message": problem.message,
            },
        }
        return told + self._event("response.failed", response=response)

    def _response(self, counts: TokenCounts | None) -> Chunk:
        """
        Args:
            counts: None while the reply is in progress.
        """
        ended = counts is not None and self._finish is not None
        response: Chunk = {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if ended else None,
            "status": self._status() if ended else "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": self._items if ended else [],
            "usage": self._usage_of(counts) if ended and counts is not None else None,
        }
        if self._finish in _INCOMPLETE and ended:
            response["incomplete_details"] = {"reason": _INCOMPLETE[self._finish or ""]}
        if self._finish in _GAVE_UP and ended:
            response["error"] = {"code": "server_error", "message": "the engine gave the reply up"}
        return response | self._described | ({} if self._model is None else {"model": self._model})

    def _status(self) -> str:
        if self._finish in _GAVE_UP:
            return "failed"
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    def _usage_of(self, counts: TokenCounts) -> Chunk:
        prompt, response = usage_of(self._usage, counts)
        cached = _detail(self._usage, "prompt_tokens_details", "cached_tokens")
        thought = _detail(self._usage, "completion_tokens_details", "reasoning_tokens")
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": response,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + response,
        }

    def _text_delta(self, kind: str, delta: str) -> list[bytes]:
        written: list[bytes] = []
        if self._open != kind:
            written += self._close()
            self._open = kind
            item = self._add_item(kind, "")
            begun = item | {"content": []}
            written.append(self._event("response.output_item.added", output_index=self._last, item=begun))
            written.append(self._part_event("response.content_part.added"))
        part = self._items[-1]["content"][0]
        part["text"] += delta
        written.append(self._text_event("delta", delta=delta))
        return written

    def _call_delta(self, call: Chunk) -> list[bytes]:
        index = call.get("index", 0)
        kind = f"call {index}"
        function = call.get("function") or {}
        written: list[bytes] = []
        if self._open != kind:
            if index in self._call_items:
                raise EngineAnswerUnusable("it goes back to an earlier tool call")
            written += self._close()
            self._open = kind
            self._call_items.add(index)
            self._arguments = ""
            self._items.append(self._new_call(call.get("id"), function.get("name") or ""))
            begun = dict(self._items[-1])
            written.append(self._event("response.output_item.added", output_index=self._last, item=begun))
        elif function.get("name"):
            self._items[-1]["name"] += function["name"]
        if arguments := function.get("arguments"):
            if self._items[-1]["type"] != "function_call":
                self._arguments += arguments  # text within JSON is whole at its end
                return written
            self._items[-1]["arguments"] += arguments
            written.append(self._item_event("response.function_call_arguments.delta", delta=arguments))
        return written

    def _close(self) -> list[bytes]:
        """End the item that is being written."""
        if self._open is None:
            return []
        self._open = None
        item = self._items[-1]
        if self._finish is not None:
            self._finish_item(item)
        else:
            item["status"] = "completed"
        if item["type"] == "function_call":
            done = [
                self._item_event(
                    "response.function_call_arguments.done", name=item["name"], arguments=item["arguments"]
                )
            ]
        elif item["type"] in _OTHER_CALLS:
            _set_arguments(item, self._arguments)
            done = []
            if item["type"] == "custom_tool_call":
                done.append(self._item_event("response.custom_tool_call_input.delta", delta=item["input"]))
                done.append(self._item_event("response.custom_tool_call_input.done", input=item["input"]))
        else:
            done = [self._text_event("done", text=item["content"][0]["text"])]
            done.append(self._part_event("response.content_part.done"))
        return [*done, self._event("response.output_item.done", output_index=self._last, item=dict(item))]

    def _finish_item(self, item: Chunk) -> None:
        last = item is self._items[-1]
        item["status"] = "incomplete" if last and self._status() != "completed" else "completed"

    @property
    def _last(self) -> int:
        return len(self._items) - 1

    def _add_item(self, kind: str, said: str) -> Chunk:
        place = f"{self._id.removeprefix('resp_')}{len(self._items)}"
        item: Chunk
        if kind == "reasoning":
            item = {"id": f"rs_{place}", "type": "reasoning", "summary": [], "status": "in_progress"}
            item["content"] = [{"type": "reasoning_text", "text": said}]
        else:
            item = {"id": f"msg_{place}", "type": "message", "role": "assistant", "status": "in_progress"}
            item["content"] = [{"type": "output_text", "text": said, "annotations": [], "logprobs": []}]
        self._items.append(item)
        return item

    def _new_call(self, call_id: str | None, name: str) -> Chunk:
        place = f"{self._id.removeprefix('resp_')}{len(self._items)}"
        origin = self._origins.get(name) or Origin("function", name)
        shared = {"call_id": call_id or f"call{place}", "status": "in_progress"}
        if origin.kind == "search":
            return {"id": f"ts_{place}", "type": "tool_search_call", "execution": "client", "arguments": {}} | shared
        named = {"name": origin.name} | ({} if origin.namespace is None else {"namespace": origin.namespace})
        if origin.kind == "custom":
            return {"id": f"ctc_{place}", "type": "custom_tool_call", "input": ""} | shared | named
        return {"id": f"fc_{place}", "type": "function_call", "arguments": ""} | shared | named

    def _text_event(self, what: str, **fields: Any) -> bytes:
        if self._items[-1]["type"] == "reasoning":
            return self._item_event(f"response.reasoning_text.{what}", content_index=0, **fields)
        return self._item_event(f"response.output_text.{what}", content_index=0, logprobs=[], **fields)

    def _part_event(self, kind: str) -> bytes:
        return self._item_event(kind, content_index=0, part=self._items[-1]["content"][0])

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._last, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **fields})


def _set_arguments(item: Chunk, arguments: str) -> None:
    match item["type"]:
        case "custom_tool_call":
            item["input"] = input_of(arguments)
        case "tool_search_call":
            item["arguments"] = arguments_of(arguments)
        case _:
            item["arguments"] = arguments


def _detail(usage: object, group: str, name: str) -> int:
    details = usage.get(group) if isinstance(usage, dict) else None
    count = details.get(name) if isinstance(details, dict) else None
    return count if isinstance(count, int) else 0


def describe(body: Chunk, chat: Chunk, origins: Mapping[str, Origin] | None = None) -> Chunk:
    """The fields of its request that a response repeats.

    Args:
        body: the client's request.
        chat: the chat request that was made of it.
        origins: of a recorded turn, whose request is not there any more: the tools that functions stand for.
    """
    reasoning = body.get("reasoning") or {}
    return {
        "model": body["model"],
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": body.get("safety_identifier"),
        "store": True,
        "temperature": body.get("temperature"),
        "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": _described_tools(body.get("tools"), chat.get("tools") or [], origins or {}),
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "user": body.get("user"),
    }


def _described_tools(given: Any, tools: list[Any], origins: Mapping[str, Origin]) -> list[Chunk]:
    """Functions as the engine gets them; what stands for another tool, as it was given."""
    if origins:
        return given_again(tools_of(tools), origins)
    others = [tool for tool in given or () if tool.get("type") in ("namespace", "custom", "tool_search")]
    if not others:
        return tools_of(tools)
    plain = {tool.get("name") for tool in given if tool.get("type") == "function"}
    return [tool for tool in tools_of(tools) if tool["name"] in plain] + others


def tools_of(tools: list[Any]) -> list[Chunk]:
    """Tools of a chat request as Responses has them."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    return [
        {
            "type": "function",
            "name": function.get("name"),
            "description": function.get("description"),
            "parameters": function.get("parameters"),
            "strict": bool(function.get("strict")),
        }
        for function in functions
        if isinstance(function, dict)
    ]
