"""OpenAI's Responses: from its request to a chat request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from api.json_lists import Objects, Texts
from api.wire.reading import PASSED_ON, Translated, named, objects, parse, text, unused, wrong
from api.wire.responses_items import messages_of
from api.wire.responses_tools import ResponsesTools
from clawloop.contracts.turns import Message
from clawloop.errors import RequestRejected

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
_REFUSED = {
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
    for name, remedy in _REFUSED.items():
        if body.get(name):
            raise RequestRejected(f"`{name}`: {remedy}.", code="unsupported_parameter", field=name)
    if not body.get("input") and not body.get("previous_response_id"):
        raise RequestRejected("`input`: say something.", code="missing_required_parameter", field="input")


def translate(body: dict[str, Any], also: Iterable[str], before: list[Message], instructions: int = 0) -> Translated:
    """The chat request that asks for the same; `check` has passed.

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


def _add_tools(chat: dict[str, Any], tools: ResponsesTools, choice: Any) -> None:
    match choice:
        case None:
            pass
        case "auto" | "none" | "required":
            if tools.functions():
                chat["tool_choice"] = choice
            elif choice == "required":
                raise wrong("tool_choice", "`required` needs `tools` of the type function")
        case {"type": "function" | "custom", "name": str(name)}:
            chat["tool_choice"] = {"type": "function", "function": {"name": _required(tools, choice, name)}}
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


def _required(tools: ResponsesTools, choice: dict[str, Any], name: str) -> str:
    if (function := tools.named(name, choice.get("namespace"))) is None:
        raise wrong("tool_choice.name", f"`tools` has no function {name[:64]!r}")
    return function


def _add_text(chat: dict[str, Any], config: dict[str, Any], ignored: list[str]) -> None:
    ignored += unused(config, ("format",), "text")
    match config.get("format"):
        case None | {"type": "text"}:
            pass
        case {"type": "json_object"}:
            chat["response_format"] = {"type": "json_object"}
        case {"type": "json_schema", "name": str(name), "schema": dict(schema)} as wanted:
            form: dict[str, Any] = {"name": name, "schema": schema}
            form |= {key: wanted[key] for key in ("strict", "description") if key in wanted}
            chat["response_format"] = {"type": "json_schema", "json_schema": form}
        case _:
            raise wrong("text.format", "it is text, json_object, or json_schema with `name` and `schema`")
