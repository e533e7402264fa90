"""The fields of a chat request: brought into the form that is meant, sent to the engine, dropped, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import JsonValue

from clawloop.core.errors import RequestRejected
from clawloop.core.samples.decision import sampling_problems

# As meant -------------------------------------------------------------------------------------------------------------
# Brings what clients send carelessly, or in another API's form, into the form that it means, so that no engine refuses
# it.

_WANTS_NONE = "a call is wanted and `tools` has none. Send tools, or leave it out"
# A name for the schema of `response_format`, which says nothing to a model.
_SCHEMA_NAME = "response"
_WHOLE = ("max_tokens", "max_completion_tokens", "n", "top_k", "seed")
# Whole floats from here on are none that somebody wrote as one, and orjson writes no whole number above 2**64.
_EXACT = 2**53
# llama.cpp's and LM Studio's word for no limit.
_NO_LIMIT = -1


def take_as_meant(body: dict[str, Any]) -> None:
    """Change a chat request in place, before it is checked; what has another type than it should stays as it is.

    Raises:
        RequestRejected: 400; a call is wanted and there are no tools, or what is wanted cannot be told.
    """
    take_sampling_as_meant(body)
    _response_format(body)
    _tools(body)
    _tool_choice(body)
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            _message(message)


def take_sampling_as_meant(body: dict[str, Any]) -> None:
    """Change sampling fields that have one clear meaning to the engine's form; for chats and plain completions."""
    for name in _WHOLE:
        value = body.get(name)
        if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
            body[name] = int(value)
        if name.startswith("max_") and body.get(name) == _NO_LIMIT:
            del body[name]
    if not body.get("stream"):
        body.pop("stream_options", None)
    _stop(body)


def _stop(body: dict[str, Any]) -> None:
    """Remove empty and repeated stop texts: engines take four."""
    stop = body.get("stop")
    if isinstance(stop, list):
        body["stop"] = stop = [each for index, each in enumerate(stop) if each not in (None, "", *stop[:index])]
    if stop in (None, "", []):
        body.pop("stop", None)


def _response_format(body: dict[str, Any]) -> None:
    match body.get("response_format"):
        case None | {"type": "text" | "json_object"}:
            pass
        case dict(empty) if not empty:
            del body["response_format"]
        case {"type": "json_schema", "json_schema": {"schema": dict(), **others}}:
            if not isinstance(others.get("name"), str):
                body["response_format"]["json_schema"]["name"] = _SCHEMA_NAME
        case {"type": "structural_tag"}:
            pass
        case _:
            known = "it is text, json_object, or json_schema with `json_schema` and a `schema` in it"
            raise _wrong("response_format", known)


def _tools(body: dict[str, Any]) -> None:
    """Functions as Responses and Messages write them, as chat requests do."""
    tools = body.get("tools")
    if not isinstance(tools, list):
        return
    for index, tool in enumerate(tools):
        match tool:
            case {"function": dict()}:
                tool.setdefault("type", "function")
            case {"name": str(name)} if tool.get("type") in (None, "function", "custom"):
                function = {"name": name, "parameters": tool.get("parameters") or tool.get("input_schema") or {}}
                function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
                tools[index] = {"type": "function", "function": function}
            case dict():
                raise _wrong(f"tools.{index}", "it is no function: `type` is function, and `function` has a `name`")


def _tool_choice(body: dict[str, Any]) -> None:
    """The choice as chat requests write it, whichever API's form it has; none where there is nothing to choose."""
    choice = body.get("tool_choice")
    match choice:
        case None | "" | "auto" | {"type": "auto"}:
            meant: Any = "auto"
        case dict(empty) if not empty:
            meant = "auto"
        case "none" | {"type": "none"}:
            meant = "none"
        case "required" | "any" | {"type": "required" | "any"}:
            meant = "required"
        case {"type": "allowed_tools", "allowed_tools": {"tools": list(allowed), **given}}:
            meant = _only(body, allowed, given.get("mode"))
        case {"type": "allowed_tools", "tools": list(allowed), **given}:
            meant = _only(body, allowed, given.get("mode"))
        case {"function": {"name": str(name)}} | {"type": "function" | "tool" | "custom", "name": str(name)}:
            meant = {"type": "function", "function": {"name": name}}
        case _:
            raise _wrong("tool_choice", "it is auto, none, required, a function by its name, or allowed_tools")
    if not body.get("tools"):
        if body.get("tools") in (None, []):
            body.pop("tools", None)
            if meant not in ("auto", "none"):
                raise _wrong("tool_choice", _WANTS_NONE)
            body.pop("tool_choice", None)
    elif meant == "auto" and choice != "auto":
        body.pop("tool_choice", None)  # as engines have it
    else:
        body["tool_choice"] = meant


def _only(body: dict[str, Any], allowed: list[Any], mode: Any) -> str:
    """Leave the other tools out."""
    names = {_name_of(tool) for tool in allowed}
    tools = body.get("tools")
    kept = [tool for tool in tools if _name_of(tool) in names] if isinstance(tools, list) else []
    if not kept:
        raise _wrong("tool_choice", "none of the allowed tools is a function in `tools`")
    body["tools"] = kept
    return "required" if mode in ("required", "any") else "auto"


def _name_of(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _wrong(field: str, message: str) -> RequestRejected:
    return RequestRejected(f"`{field}`: {message}.", code="invalid_value", field=field)


def _message(message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if "content" in message and message["content"] is None and not calls:
        message["content"] = ""
    if message.get("role") == "tool" and isinstance(message.get("content"), dict | int | float):
        message["content"] = orjson.dumps(message["content"]).decode()  # a result that was not written as text
    if not calls:
        message.pop("tool_calls", None)
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        if arguments is None or arguments == "":
            function["arguments"] = "{}"
        elif not isinstance(arguments, str):
            function["arguments"] = orjson.dumps(arguments).decode()


# Sorting --------------------------------------------------------------------------------------------------------------
# Those that go to the engine, those that are dropped, and those that are refused.

# Clawloop's own fields; the engine does not get them.
CLAWLOOP_FIELDS = frozenset({"session_id", "session_done", "turn_type"})
# Fields of OpenAI's chat completions and of vLLM 0.32 for the prompt, the sampling and the form of an answer.
_ENGINE_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "allowed_token_ids",
        "bad_words",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "frequency_penalty",
        "function_call",
        "functions",
        "guided_choice",  # older engines' names of structured outputs
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "min_p",
        "min_tokens",
        "model",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "reasoning_effort",
        "repetition_detection",
        "repetition_penalty",
        "response_format",
        "return_token_ids",
        "seed",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
        "user",
    }
)
# What the engine is asked for besides the tokens is ours, and what the client sees is filtered here: an engine that
# leaves reasoning out leaves out its token ids as well.
_OUR_FIELDS = frozenset({"include_reasoning"})
# Read to find the session or the kind of the turn, or to keep equal conversations of different users apart.
_IDENTIFYING = frozenset({"client_metadata", "metadata", "prompt_cache_key", "safety_identifier"})
# Those that reach into the engine: its queue and caches, its extensions, the files it reads, or the prompt that is
# recorded. `prompt_logprobs` and beams cost a multiple of a chat, and the recorded tokens would not be a sample. `echo`
# puts the prompt before the reply, in a completion with its log-probs.
_REFUSED_FIELDS = frozenset(
    {
        "cache_salt",
        "chat_template",
        "ec_transfer_params",
        "echo",
        "kv_transfer_params",
        "lora_request",
        "media_io_kwargs",
        "mm_payload",
        "mm_processor_kwargs",
        "priority",
        "prompt_logprobs",
        "request_id",
        "return_mm_kwargs",
        "return_prompt_text",
        "return_token_offsets",
        "return_tokens_as_token_ids",
        "routed_experts_prompt_start",
        "truncate_prompt_tokens",
        "truncation_side",
        "use_beam_search",
        "vllm_xargs",
        "watermarking",
    }
)
# A header may name them all; a client with thousands of unknown fields does not read it.
NAMED_LIMIT = 32


@dataclass(frozen=True, slots=True)
class SortedFields:
    """The fields of one request.

    Args:
        engine: what the engine gets.
        ignored: names of the fields that were dropped, sorted, at most 32.
    """

    engine: dict[str, Any]
    ignored: tuple[str, ...]


def sort_fields(body: dict[str, Any], also_to_engine: Iterable[str] = ()) -> SortedFields:
    """Separate what the engine gets from what it does not use.

    Args:
        also_to_engine: names that go to the engine too, by `CLAWLOOP_ENGINE_FIELDS`.

    Raises:
        RequestRejected: names the first field that only the operator of an engine may set.
    """
    refuse_internal(body, also_to_engine)
    known = _ENGINE_FIELDS.union(also_to_engine)
    read = known | CLAWLOOP_FIELDS | _OUR_FIELDS | _IDENTIFYING
    ignored = sorted([*(name for name in body if name not in read and body[name] is not None), *_of_metadata(body)])
    printable = tuple(name for name in ignored if name.isascii() and name.isprintable() and len(name) <= 64)
    return SortedFields({name: value for name, value in body.items() if name in known}, printable[:NAMED_LIMIT])


def _of_metadata(body: dict[str, Any]) -> list[str]:
    metadata = body.get("metadata")
    if not isinstance(metadata, dict) or "session_id" not in metadata:
        return [] if metadata is None else ["metadata"]
    return [f"metadata.{name}" for name in metadata if name != "session_id"]


def refuse_internal(body: dict[str, Any], allowed: Iterable[str]) -> None:
    """
    Args:
        allowed: names that go to the engine, by `CLAWLOOP_ENGINE_FIELDS`.

    Raises:
        RequestRejected: names the first field that only the operator of an engine may set.
    """
    for name in body:
        if name in _REFUSED_FIELDS and name not in frozenset(allowed):
            raise RequestRejected(
                f"`{name}` is internal to the engine and is not taken from clients. Leave it out; the operator of this "
                f"gateway can allow it with `CLAWLOOP_ENGINE_FIELDS`.",
                code="unsupported_parameter",
                field=name,
            )


# Tools of a forced call -----------------------------------------------------------------------------------------------
# Without `strict`, engines let a forced call have any arguments, such as `true`.


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


# Episodes -------------------------------------------------------------------------------------------------------------
# Requests with an episode's key: sampled as the trainer can use them, or refused.

# The distribution that the trainer computes log-probs of; penalties and cuts of it are left out. So is a seed, by which
# all attempts at a task would be the same.
_SAMPLING: dict[str, JsonValue] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
_LEFT_OUT = (
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "parallel_tool_calls",
    "seed",
)


def trainable_fields(fields: dict[str, Any], body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, JsonValue]]:
    """The engine's fields with sampling that the trainer can use, and what the client asked for instead.

    Args:
        fields: of the engine, with defaults filled in.
        body: the client's own.

    Raises:
        RequestRejected: 400; the client asks for more than one choice, a grammar, a forced tool, or another setting
            whose log-probs the trainer cannot reproduce.
    """
    if (body.get("n") or 1) != 1:
        raise RequestRejected("An episode's key takes one choice a request: leave `n` out.", field="n")
    sent = {name: value for name, value in fields.items() if name not in _LEFT_OUT} | _SAMPLING
    named = (*_SAMPLING, *_LEFT_OUT)
    asked = {name: body[name] for name in named if body.get(name) is not None and body[name] != _SAMPLING.get(name)}
    if problems := sampling_problems(sent, sent.get("tools")):
        raise RequestRejected(
            f"An episode's key does not take {', '.join(problems)}: its turns could not be trained. Leave it out.",
            code="invalid_value",
            field=problems[0] if problems[0] in body else None,
        )
    return sent, asked
