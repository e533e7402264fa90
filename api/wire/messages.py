"""Anthropic's Messages: its request to a chat request, and a chat completion to its answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.datastructures import Headers

from api.errors import Problem
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
from api.wire.reply import Chunk, TokenCounts, event, require_ended, usage_of
from clawloop.core.contracts.turns import Message
from clawloop.core.errors import EngineAnswerUnusable, RequestRejected
from clawloop.core.turns.continued import CONTINUES

# Requests -------------------------------------------------------------------------------------------------------------
# Anthropic's Messages: from its request to a chat request.

# Published ones: what is read here is the same in all of them.
VERSIONS = ("2023-06-01", "2026-10-21", "2023-01-01")

_USED = frozenset(
    {
        "max_tokens",
        "messages",
        "metadata",
        "model",
        "output_config",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    }
)
_SAME_NAME = ("max_tokens", "model", "stream", "temperature", "top_k", "top_p")
_NAMES = {"stop": "stop_sequences", "response_format": "output_config", "max_completion_tokens": "max_tokens"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# A line that Claude Code puts in front of its system prompt, different in each request.
_BILLING = "x-anthropic-billing-header"
# Claude Code's `user_id`: `user_…_account_…_session_UUID`, or JSON.
_SESSION = re.compile(r"(?P<user>.*)_session_(?P<session>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12})", re.DOTALL)


class CountTokensRequest(BaseModel):
    """The fields of `POST /v1/messages/count_tokens` that the gateway reads."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(min_length=1, max_length=256, examples=["policy"])]
    messages: Annotated[Objects, Field(min_length=1, examples=[[{"role": "user", "content": "Hello"}]])]
    system: str | Objects | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


# A text alone is meant as a list of one.
StopTexts = Annotated[Texts, BeforeValidator(lambda given: [given] if isinstance(given, str) else given)]


class MessagesRequest(CountTokensRequest):
    """The fields of `POST /v1/messages` that the gateway reads."""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: StopTexts | None = None
    metadata: dict[str, Any] | None = None


def check_version(headers: Headers) -> None:
    """
    Raises:
        RequestRejected: the header is missing, or names no published version.
    """
    version = headers.get("anthropic-version")
    if version not in VERSIONS:
        found = "is missing" if version is None else f"is {version[:40]!r}"
        raise RequestRejected(f"The header `anthropic-version` {found}. Send `{VERSIONS[0]}`.", code="invalid_value")


def translate_messages(
    body: dict[str, Any], also: Iterable[str], schema: type[BaseModel] = MessagesRequest
) -> Translated:
    """Translate a request of Anthropic's Messages to the chat request that asks for the same reply.

    Args:
        also: further fields that go to the engine.

    Raises:
        RequestRejected: names the field and the remedy.
    """
    parse(schema, body)
    passed = PASSED_ON.union(also)
    ignored = unused(body, _USED | passed)
    chat: dict[str, Any] = {name: body[name] for name in passed if body.get(name) is not None}
    chat |= {name: body[name] for name in _SAME_NAME if body.get(name) is not None}
    loaded = _Loaded()
    chat["messages"] = [*_system(body.get("system"), loaded), *_messages(body["messages"], ignored, loaded)]
    if stop := body.get("stop_sequences"):
        chat["stop"] = [stop] if isinstance(stop, str) else stop
    _add_tools(chat, body, ignored, loaded)
    _add_thinking(chat, body.get("thinking") or {}, ignored)
    _add_output_config(chat, body.get("output_config") or {}, ignored)
    _add_metadata(chat, body.get("metadata") or {}, ignored)
    if chat["messages"][-1]["role"] == "assistant":
        # A reply that the client began: the model goes on from there.
        if "tool_calls" in chat["messages"][-1]:
            place = f"messages.{len(body['messages']) - 1}"
            raise wrong(place, "a reply cannot go on after `tool_use`. Send a user message with the `tool_result`")
        chat |= {CONTINUES: True, "add_generation_prompt": False}
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return Translated(chat, named(ignored), _NAMES)


class _Loaded:
    """Names of the deferred tools that the history loaded, in order, and of tools that it removed."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.removed: set[str] = set()

    def add(self, name: Any) -> str:
        """Returns what the model reads of it."""
        self.names[str(name)] = None
        self.removed.discard(str(name))
        return f"[tool loaded: {name}]"

    def remove(self, name: Any) -> str:
        self.names.pop(str(name), None)
        self.removed.add(str(name))
        return f"[tool removed: {name}]"


def _system(system: Any, loaded: _Loaded) -> list[Message]:
    if system is None:
        return []
    if isinstance(system, str):
        texts = [system]
    else:
        texts = [_system_text(block, place, loaded) for block, place in blocks(system, "system")]
    texts = [part for part in texts if part and not part.startswith(_BILLING)]
    return [{"role": "system", "content": "\n".join(texts)}] if texts else []


def _system_text(block: dict[str, Any], place: str, loaded: _Loaded) -> str:
    if block.get("type") == "text":
        return text(block.get("text"), f"{place}.text")
    return _kept(block, place, loaded)


def _kept(block: dict[str, Any], place: str, loaded: _Loaded) -> str:
    """A block that a chat request cannot express, as text; tools that it loads are noted."""
    match block:
        case {"type": "tool_reference", "tool_name": name} | {"type": "tool_reference", "name": name}:
            return loaded.add(name)
        case {"type": "tool_addition", "tool": {"name": name, **tool}}:
            return loaded.add(_tool_name(name, tool))
        case {"type": "tool_removal", "tool": {"name": name, **tool}}:
            return loaded.remove(_tool_name(name, tool))
        case {"type": "tool_search_tool_result", "content": {"tool_references": list(references)}}:
            names = [found.get("tool_name") for found in references if isinstance(found, dict)]
            return "\n".join(loaded.add(name) for name in names if name is not None)
        case {"type": "search_result"}:
            said = [block.get("title"), block.get("source")]
            said += [part.get("text") for part in block.get("content") or () if isinstance(part, dict)]
            return "\n".join(part for part in said if isinstance(part, str) and part)
        case {"type": "compaction", "content": str(summary)}:
            return summary
        case {"type": str()}:
            return kept(block, place)
    raise wrong(f"{place}.type", "input should be a string")


def _tool_name(name: Any, tool: Mapping[Any, Any]) -> str:
    """The name by which a model calls a tool; of an MCP server's, with the server's."""
    server = tool.get("server_name")
    return f"mcp__{server}__{name}" if isinstance(server, str) else str(name)


def _messages(messages: list[Any], ignored: list[str], loaded: _Loaded) -> list[Message]:
    translated: list[Message] = []
    calls: set[str] = set()
    last = last_of_user(messages)
    unreadable = Unreadable(ignored)
    for index, (message, place) in enumerate(objects(messages, "messages")):
        content = message.get("content")
        unreadable.earlier = index < last
        match message.get("role"):
            case "user":
                translated += _user(content, f"{place}.content", calls, unreadable, loaded)
            case "assistant":
                translated.append(_assistant(content, f"{place}.content", calls, loaded))
            case "system":
                parts = blocks(content, f"{place}.content")
                texts = [_system_text(block, at, loaded) for block, at in parts]
                translated.append({"role": "system", "content": "\n".join(texts)})
            case role:
                raise wrong(f"{place}.role", f"{str(role)[:40]!r} is not one of user, assistant, system")
    return translated


def _user(content: Any, place: str, calls: set[str], unreadable: Unreadable, loaded: _Loaded) -> list[Message]:
    """A user message: the results of tools as messages of their own, in order."""
    if content is None or isinstance(content, str):
        return [{"role": "user", "content": content or ""}]
    translated: list[Message] = []
    parts: list[Any] = []

    def close_message() -> None:
        if parts:
            translated.append({"role": "user", "content": _plain(parts)})
            parts.clear()

    for block, at in blocks(content, place):
        if block.get("type") == "tool_result":
            close_message()
            translated.append(_tool_result(block, at, calls, unreadable, loaded))
            if block.get("is_error"):
                unreadable.ignored.append("tool_result.is_error")
        else:
            parts.extend(_user_parts(block, at, unreadable, loaded))
    close_message()
    if not translated:
        raise wrong(place, "it is empty")
    return translated


def _user_parts(block: dict[str, Any], place: str, unreadable: Unreadable, loaded: _Loaded) -> list[dict[str, Any]]:
    match block.get("type"):
        case "text":
            return [{"type": "text", "text": text(block.get("text"), f"{place}.text")}]
        case "image":
            return [_image(block.get("source"), place, unreadable)]
        case "document":
            return _document(block, place, unreadable, loaded)
    return [{"type": "text", "text": _kept(block, place, loaded)}]


def _document(block: dict[str, Any], place: str, unreadable: Unreadable, loaded: _Loaded) -> list[dict[str, Any]]:
    """Content parts of a document: its title and context, then its text or its blocks."""
    heading = [text(block[name], f"{place}.{name}") for name in ("title", "context") if block.get(name) is not None]
    parts = [{"type": "text", "text": "\n".join(heading)}] if heading else []
    match block.get("source"):
        case {"type": "text", **said}:
            return [*parts, {"type": "text", "text": text(said.get("data"), f"{place}.source.data")}]
        case {"type": "content", "content": given}:
            for inner, at in blocks(given, f"{place}.source.content"):
                if inner.get("type") == "document":
                    raise wrong(f"{at}.type", "a document holds text and images, no document")
                parts += _user_parts(inner, at, unreadable, loaded)
            return parts
    refused = wrong(
        f"{place}.source",
        "engines read text and images, no PDF or other file. Send the text of the document (`type` text with `data`), "
        "or its pages as `image` blocks",
    )
    line = unreadable.line("document", block.get("title"), place, refused)
    context = [block["context"]] if block.get("context") else []
    return [{"type": "text", "text": "\n".join([line, *context])}]


def _image(source: Any, place: str, unreadable: Unreadable) -> dict[str, Any]:
    match source:
        case {"type": "base64", "media_type": str(media_type), "data": str(data)}:
            return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}
        case {"type": "url", "url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
    refused = wrong(f"{place}.source", "an image is `base64` with `media_type` and `data`, or `url` with `url`")
    return {"type": "text", "text": unreadable.line("image", None, place, refused)}


def _tool_result(
    block: dict[str, Any], place: str, calls: set[str], unreadable: Unreadable, loaded: _Loaded
) -> Message:
    call = text(block.get("tool_use_id"), f"{place}.tool_use_id")
    if call not in calls:
        raise wrong(
            f"{place}.tool_use_id",
            "no `tool_use` block before it has this id. Send the assistant's message with the call first",
        )
    content = block.get("content")
    if content is None or isinstance(content, str):
        return {"role": "tool", "tool_call_id": call, "content": content or ""}
    if isinstance(content, int | float) or (isinstance(content, dict) and "type" not in content):
        # A result that was not written as text.
        return {"role": "tool", "tool_call_id": call, "content": orjson.dumps(content).decode()}
    given = [content] if isinstance(content, dict) else content
    found = (_user_parts(inner, at, unreadable, loaded) for inner, at in blocks(given, f"{place}.content"))
    parts = [part for inner in found for part in inner]
    return {"role": "tool", "tool_call_id": call, "content": _plain(parts) if parts else ""}


def _plain(parts: list[Any]) -> Any:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else list(parts)


def _assistant(content: Any, place: str, calls: set[str], loaded: _Loaded) -> Message:
    texts: list[str] = []
    thinking: list[str] = []
    tool_calls: list[Any] = []
    for block, at in blocks(content, place):
        match block.get("type"):
            case "text":
                texts.append(text(block.get("text"), f"{at}.text"))
            case "thinking":
                thinking.append(text(block.get("thinking"), f"{at}.thinking"))
            case "redacted_thinking" | "fallback":
                pass  # encrypted by whoever made it, or about which model wrote it
            case "tool_use":
                tool_calls.append(_tool_use(block, at))
                calls.add(tool_calls[-1]["id"])
            case _:
                # Run by a server of Anthropic's: a line of its own, as no call of this conversation.
                texts.append(f"\n{_kept(block, at, loaded)}\n")
    message: Message = {"role": "assistant", "content": "".join(texts) if texts or not tool_calls else None}
    if thinking:
        message["reasoning_content"] = "".join(thinking)
    if tool_calls:
        message["tool_calls"] = tool_calls
    return message


def _tool_use(block: dict[str, Any], place: str) -> dict[str, Any]:
    given = block.get("input")
    match given:
        case {"raw_arguments": str(raw), **others} if not others:  # of a reply whose arguments were no object
            arguments = raw
        case _:
            arguments = orjson.dumps({} if given is None else given).decode()
    function = {"name": text(block.get("name"), f"{place}.name"), "arguments": arguments}
    return {"id": text(block.get("id"), f"{place}.id"), "type": "function", "function": function}


def _add_tools(chat: dict[str, Any], body: dict[str, Any], ignored: list[str], loaded: _Loaded) -> None:
    shown: dict[str, dict[str, Any]] = {}
    deferred: dict[str, dict[str, Any]] = {}
    searched_elsewhere = False
    for tool, place in objects(body.get("tools") or [], "tools"):
        if tool.get("type") not in (None, "custom"):
            # Run or defined by Anthropic's servers.
            ignored.append(f"{place}.{tool['type']}")
            searched_elsewhere |= str(tool["type"]).startswith("tool_search_tool")
            continue
        function: dict[str, Any] = {"name": text(tool.get("name"), f"{place}.name")}
        schema = tool.get("input_schema")
        if schema is not None and not isinstance(schema, dict):
            raise wrong(f"{place}.input_schema", "input should be an object")
        function |= {"parameters": schema or {"type": "object", "properties": {}}}
        function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
        (deferred if tool.get("defer_loading") else shown)[function["name"]] = function
    choice = _choice(body.get("tool_choice"))
    if searched_elsewhere:
        # Without that server's search none of them could ever be found.
        shown |= deferred
    # Last, so that the tools before them stay where they are in the prompt.
    shown |= {name: deferred[name] for name in (*loaded.names, choice.get("name")) if name in deferred}
    tools = [{"type": "function", "function": tool} for name, tool in shown.items() if name not in loaded.removed]
    if tools:
        chat["tools"] = tools
    if choice:
        _add_tool_choice(chat, choice)


def _choice(given: Any) -> dict[str, Any]:
    """Anthropic's form of a choice, for one in OpenAI's."""
    match given:
        case None | "":
            return {}
        case str():
            return {"type": {"required": "any"}.get(given, given)}
        case {"type": "function", "function": {"name": name}} | {"type": "function", "name": name}:
            return {"type": "tool", "name": name}
    return dict(given)


def _add_tool_choice(chat: dict[str, Any], choice: dict[str, Any]) -> None:
    kind = choice.get("type")
    if kind == "tool":
        name = text(choice.get("name"), "tool_choice.name")
        if name not in {tool["function"]["name"] for tool in chat.get("tools", ())}:
            raise wrong("tool_choice.name", f"`tools` has no tool {name[:64]!r}")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _CHOICES:
        if "tools" in chat:
            chat["tool_choice"] = _CHOICES[kind]
        elif kind == "any":
            raise wrong("tool_choice", "`any` needs `tools`")
    else:
        raise wrong("tool_choice.type", "it is one of auto, any, tool, none")
    if choice.get("disable_parallel_tool_use") and "tools" in chat:
        chat["parallel_tool_calls"] = False


def _add_thinking(chat: dict[str, Any], thinking: dict[str, Any], ignored: list[str]) -> None:
    kind = thinking.get("type")
    if thinking and kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise wrong("thinking.type", "it is one of enabled, disabled, adaptive, between_tools")
    ignored += unused(thinking, ("type",), "thinking")
    if kind in ("enabled", "disabled"):
        own = chat.get("chat_template_kwargs")
        chat["chat_template_kwargs"] = {"enable_thinking": kind == "enabled"} | (own if isinstance(own, dict) else {})


def _add_output_config(chat: dict[str, Any], config: dict[str, Any], ignored: list[str]) -> None:
    ignored += unused(config, ("effort", "format"), "output_config")
    if (effort := config.get("effort")) is not None:
        chat["reasoning_effort"] = text(effort, "output_config.effort")
    match config.get("format"):
        case None:
            pass
        case {"type": "json_schema", "schema": dict(schema)}:
            form = {"name": "output", "schema": schema, "strict": True}
            chat["response_format"] = {"type": "json_schema", "json_schema": form}
        case _:
            raise wrong("output_config.format", "it is `json_schema` with `schema`")


def _add_metadata(chat: dict[str, Any], metadata: dict[str, Any], ignored: list[str]) -> None:
    ignored += unused(metadata, ("user_id", "session_id"), "metadata")
    session = metadata.get("session_id")
    if (user := metadata.get("user_id")) is not None:
        user = text(user, "metadata.user_id")
        found = _SESSION.fullmatch(user)
        described = _json_object(user)
        if found is not None:
            user, session = found["user"], session or found["session"]
        elif isinstance(described.get("session_id"), str):
            session = session or described.pop("session_id")
            try:
                user = orjson.dumps(described).decode()
            except orjson.JSONEncodeError:
                raise wrong("metadata.user_id", "its JSON is nested too deeply") from None
        chat["user"] = user
    if session is not None:
        chat["metadata"] = {"session_id": text(session, "metadata.session_id")}


def _json_object(value: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(value)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


# Replies --------------------------------------------------------------------------------------------------------------
# Anthropic's Messages: from a chat completion to its answer, streamed or whole.

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


class MessagesReply:
    """
    Args:
        message_id: of the message.
        model: the name that the client asked for, where the engine gives none.
    """

    streams_overflow = False

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._started = False
        self._usage: Chunk | None = None
        self._finish: str | None = None
        self._stop: object = None
        self._blocks = 0
        self._open: str | None = None  # what the block that is being written holds
        self._calls: dict[int, Chunk] = {}  # by index: what is known of calls whose name has not come yet
        self._begun: set[int] = set()

    def as_chat(self, chunk: Chunk) -> Chunk:
        return chunk

    def whole(self, body: Chunk, counts: TokenCounts) -> Chunk:
        choice = body["choices"][0]
        self._take_end(choice)
        message = choice["message"]
        content: list[Chunk] = []
        if message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        content += [_tool_use_block(call) for call in message.get("tool_calls") or ()]
        prompt, response = usage_of(body.get("usage"), counts)
        return self._message(body, prompt, response, content) | {
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
        }

    def part(self, chunk: Chunk, counts: TokenCounts) -> bytes:
        written: list[bytes] = []
        if not self._started:
            self._started = True
            message = self._message(chunk, counts.prompt or 0, 0, [])
            written.append(event({"type": "message_start", "message": message}))
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            if thought := delta.get("reasoning_content"):
                written += self._text_delta("thinking", "thinking_delta", thought)
            if said := delta.get("content"):
                written += self._text_delta("text", "text_delta", said)
            for call in delta.get("tool_calls") or ():
                written += self._call_delta(call)
            if choice.get("finish_reason") is not None:
                self._take_end(choice)
                written += self._close()
        return b"".join(written)

    def end(self, counts: TokenCounts) -> bytes:
        prompt, response = usage_of(self._usage, counts)
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        usage = {"input_tokens": prompt, "output_tokens": response}
        return event({"type": "message_delta", "delta": delta, "usage": usage}) + event({"type": "message_stop"})

    def failure(self, problem: Problem) -> bytes:
        return b"event: error\ndata: " + problem.anthropic() + b"\n\n"

    def _message(self, chunk: Chunk, prompt: int, response: int, content: list[Chunk]) -> Chunk:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model") or self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": prompt, "output_tokens": response},
        }

    def _take_end(self, choice: Chunk) -> None:
        self._finish = choice["finish_reason"]
        self._stop = choice.get("stop_reason")
        require_ended(self._finish)

    def _stop_reason(self) -> str:
        if self._finish == "stop" and self._stop_sequence() is not None:
            return "stop_sequence"
        return _STOP_REASONS.get(self._finish or "", "end_turn")

    def _stop_sequence(self) -> str | None:
        return self._stop if isinstance(self._stop, str) else None

    def _text_delta(self, kind: str, delta: str, said: str) -> list[bytes]:
        written = self._begin(kind, {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        return [*written, self._delta({"type": delta, kind: said})]

    def _call_delta(self, call: Chunk) -> list[bytes]:
        index = call.get("index", 0)
        kind = f"call {index}"
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        if self._open == kind:
            return [self._delta({"type": "input_json_delta", "partial_json": arguments})] if arguments else []
        if index in self._begun:
            raise EngineAnswerUnusable("it goes back to an earlier tool call")
        known = self._calls.setdefault(index, {"id": None, "name": "", "arguments": ""})
        known["id"] = call.get("id") or known["id"]
        known["name"] += function.get("name") or ""
        known["arguments"] += arguments
        if not known["name"]:
            return []
        self._begun.add(index)
        call_id = known["id"] or f"toolu_{self._id.removeprefix('msg_')}{index}"
        block = {"type": "tool_use", "id": call_id, "name": known["name"], "input": {}}
        written = self._begin(kind, block)
        if known["arguments"]:
            written.append(self._delta({"type": "input_json_delta", "partial_json": known["arguments"]}))
        return written

    def _begin(self, kind: str, block: Chunk) -> list[bytes]:
        """Open a block of this kind, unless one is open."""
        if self._open == kind:
            return []
        written = self._close()
        self._open = kind
        self._blocks += 1
        return [*written, event({"type": "content_block_start", "index": self._blocks - 1, "content_block": block})]

    def _delta(self, delta: Chunk) -> bytes:
        return event({"type": "content_block_delta", "index": self._blocks - 1, "delta": delta})

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [event({"type": "content_block_stop", "index": self._blocks - 1})]


def _tool_use_block(call: Chunk) -> Chunk:
    arguments: str = call["function"].get("arguments") or "{}"
    try:
        given: Any = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        given = None
    if not isinstance(given, dict):  # the wire format has objects only; a client sends this back as it is
        given = {"raw_arguments": arguments}
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
