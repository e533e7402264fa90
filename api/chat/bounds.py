"""Bounds on a chat request, so that no key's requests hold an engine that others wait for.

Bodies are limited to 32 MiB before this; what is checked here is cheap to send and dear to render or to compile.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import orjson

from api.chat.schema_references import check_references
from api.json_bounds import DEPTH_LIMIT, is_text_too_deep
from clawloop.core.errors import RequestRejected
from clawloop.core.settings import ChatBounds

_COUNTED_LISTS = ("stop", "stop_token_ids", "bad_words")
_GUIDED = ("guided_choice", "guided_grammar", "guided_json", "guided_regex")
_EXPRESSIONS = ("regex", "pattern", "whitespace_pattern")
# Fields in which vLLM accepts a schema as JSON text too.
_JSON_TEXTS = ("json", "structural_tag")
# A quantifier of a regular expression: optional, or with a number.
_QUANTIFIER = re.compile(
    r"\\.|\[(?:\\.|[^\\\]])*\]|\(\?|(?P<optional>[?*])|\{(?P<least>[0-9]{0,9})(?:,(?P<most>[0-9]*))?\}", re.DOTALL
)
# An optional item costs as much as this many repetitions: in a row of them, each may follow each earlier one.
_OPTIONAL = 16
# The engine writes out no more of one repetition.
_WRITTEN_OUT = 256
# Parts of messages whose data an engine turns into no token by its tokenizer.
_FILES = ("image_url", "video_url", "audio_url", "input_audio")
_COUNTED_TOKENS = ("logit_bias", "allowed_token_ids", "logprob_token_ids")


def check_bounds(body: dict[str, Any], bounds: ChatBounds) -> None:
    """
    Raises:
        RequestRejected: names the field and the bound that is exceeded.
    """
    _require(_message_count(body["messages"]), bounds.messages, "messages", "messages, content parts and tool calls")
    _require(_length(body.get("tools")), bounds.tools, "tools", "tools")
    _require(_length(body.get("functions")), bounds.tools, "functions", "functions")
    _require(_length(body.get("documents")), bounds.messages, "documents", "documents")
    _require(body.get("n") or 1, bounds.n, "n", "choices")
    for name in _COUNTED_LISTS:
        _require(_length(body.get(name)), bounds.stop, name, "entries")
        _require(_characters(body.get(name)), bounds.stop_length, name, "characters")
    for name in _COUNTED_TOKENS:
        _require(_length(body.get(name)), bounds.token_ids, name, "entries")
    _check_arguments(body["messages"])
    for name, form in forced_forms(body):
        _check_texts(name, form)
        _check_form(name, form, bounds)
        check_references(name, form)


def check_counted(body: dict[str, Any], bounds: ChatBounds) -> None:
    """
    Raises:
        RequestRejected: its texts are longer than an engine may be asked to count.
    """
    for name in ("messages", "tools", "chat_template_kwargs"):
        characters = 0
        for key, value in _walk(_without_files(body.get(name))):
            characters += len(key or "") + (len(value) if isinstance(value, str) else 0)
        _require(characters, bounds.counted_characters, name, "characters of which to count the tokens")


def _without_files(value: Any) -> Any:
    """Messages without their images and files, which are no text."""
    if not isinstance(value, list):
        return value
    return [
        message | {"content": [part for part in message["content"] if not _is_file(part)]}
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        else message
        for message in value
    ]


def _is_file(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _FILES


def forced_forms(body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The schemas that the engine compiles into a grammar, each with the name of its field."""
    forms: list[tuple[str, Any]] = []
    response_format = body.get("response_format")
    if isinstance(response_format, dict) and response_format.get("type") not in ("text", "json_object"):
        forms.append(("response_format", response_format))
    if isinstance(body.get("structured_outputs"), dict):
        forms.append(("structured_outputs", body["structured_outputs"]))
    forms += [(name, {name.removeprefix("guided_"): body[name]}) for name in _GUIDED if body.get(name) is not None]
    tools = body.get("tools")
    if not isinstance(tools, list) or body.get("tool_choice") == "none":
        return forms
    forced = body.get("tool_choice") not in (None, "auto")
    # vLLM compiles the schemas of all tools into one grammar if a call is forced, else those marked strict.
    schemas = [tool for tool in tools if forced or _is_strict(tool)]
    return [*forms, ("tools", schemas)] if schemas else forms


def _check_arguments(messages: list[dict[str, Any]]) -> None:
    """Engines parse the arguments of past calls for the chat template."""
    for position, message in enumerate(messages):
        calls = message.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str) and is_text_too_deep(arguments):
                raise _too_deep(f"messages.{position}.tool_calls.{number}.function.arguments")


def _check_texts(name: str, form: Any) -> None:
    """Refuse text that is not JSON here: the engine might read it as JSON, and compile it without bounds."""
    for key in _JSON_TEXTS:
        text = form.get(key) if isinstance(form, dict) else None
        if not isinstance(text, str):
            continue
        if is_text_too_deep(text):
            raise _too_deep(name)
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise RequestRejected(
                f"`{name}`: `{key}` is not JSON: {error.msg} at character {error.pos}.",
                code="invalid_value",
                field=name,
            ) from None


def _check_form(name: str, form: Any, bounds: ChatBounds) -> None:
    _require(len(orjson.dumps(form)), bounds.grammar_bytes, name, "bytes of schema or grammar")
    nodes = 0
    written: set[str] = set()
    lengths: set[tuple[Any, Any]] = set()
    for key, value in _walk(form):
        nodes += isinstance(value, dict | list)
        expressions: Iterable[str] = ()
        if key in _EXPRESSIONS and isinstance(value, str):
            expressions = (value,)
        if key == "patternProperties" and isinstance(value, dict):
            expressions = value
        for expression in expressions:
            _require(len(expression), bounds.regex_length, name, "characters in a regular expression")
        written.update(expressions)
        if isinstance(value, dict):
            lengths.add((_counted(value.get("minLength")), _counted(value.get("maxLength"))))
        if key == "choice":
            _require(_length(value), bounds.choices, name, "choices")
        if key == "grammar" and isinstance(value, str) and not bounds.free_grammars:
            raise RequestRejected(
                f"`{name}`: grammars of clients are not accepted here, as a short one can hold the engine for minutes."
                " Send a JSON schema, a regular expression or a list of choices; the operator of this gateway can allow"
                " grammars with `CLAWLOOP_CHAT_BOUNDS__FREE_GRAMMARS`.",
                code="unsupported_parameter",
                field=name,
            )
    _require(nodes, bounds.schema_nodes, name, "objects and arrays in a schema")
    # The engine compiles what is equal once.
    repetitions = sum(map(_repetitions, written)) + sum(map(max, lengths))
    _require(repetitions, bounds.repetitions, name, "repetitions and characters of counted lengths")


def _repetitions(expression: str) -> int:
    total = 0
    for found in _QUANTIFIER.finditer(expression):
        least, most = found["least"], found["most"]
        if found["optional"] or (least is not None and not int(least or 0)):
            total += _OPTIONAL
        total += _counted(int((most or least or "0")[:9]))
    return total


def _counted(length: Any) -> int:
    return min(length, _WRITTEN_OUT) if isinstance(length, int) and length > 0 else 0


def _walk(form: Any) -> Iterator[tuple[str | None, Any]]:
    """Every value of nested JSON with its key; None as the key of a list's entry. Looks into schemas given as text."""
    waiting: list[tuple[str | None, Any]] = [(None, form)]
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if key in _JSON_TEXTS and isinstance(value, str):
            with suppress(orjson.JSONDecodeError):
                value = orjson.loads(value)
        if isinstance(value, dict):
            waiting.extend(value.items())
        elif isinstance(value, list):
            waiting.extend((None, entry) for entry in value)


def _message_count(messages: list[dict[str, Any]]) -> int:
    lists = (message.get(name) for message in messages for name in ("content", "tool_calls"))
    return len(messages) + sum(len(entries) for entries in lists if isinstance(entries, list))


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and function.get("strict") is True


def _characters(value: Any) -> int:
    entries = value if isinstance(value, list) else [value]
    return sum(len(entry) for entry in entries if isinstance(entry, str))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list | dict) else 0


def _too_deep(field: str) -> RequestRejected:
    return RequestRejected(
        f"`{field}`: nested too deeply, at most {DEPTH_LIMIT} levels are accepted. Send it flatter.",
        code="request_too_complex",
        field=field,
    )


def _require(count: int, bound: int, field: str, what: str) -> None:
    if count > bound:
        raise RequestRejected(
            f"`{field}`: {count} {what}, at most {bound} are accepted. Send fewer.",
            code="request_too_complex",
            field=field,
        )
