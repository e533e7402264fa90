"""Reads the fields of requests in other wire formats; an error names the field as the client spells it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError

from api.chat.fields import CLAWLOOP_FIELDS
from api.errors import first_invalid_field
from clawloop.core.errors import RequestRejected

# Sampling fields of vLLM that go to the engine in every wire format.
PASSED_ON = frozenset({"chat_template_kwargs", "min_p", "repetition_penalty", "seed", "top_k"}) | CLAWLOOP_FIELDS


@dataclass(frozen=True, slots=True)
class Translated:
    """A request as chat completions have it.

    Args:
        body: the chat request.
        ignored: the client's fields that were dropped, in its own spelling.
        names: the chat field of an error, as the client spells it where that differs.
        instructions: how many characters at the beginning of the system message are `instructions`.
        origins: the client's tools that are no plain functions, by the name of the function that stands for each.
    """

    body: dict[str, Any]
    ignored: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)
    instructions: int = 0
    origins: Mapping[str, Any] = field(default_factory=dict)

    def blame(self, error: RequestRejected) -> RequestRejected:
        """The error with the client's name of the field in place of the chat request's."""
        name = self.names.get(error.field or "")
        if name is None:
            return error
        message = error.message.replace(f"`{error.field}`", f"`{name}`")
        return RequestRejected(message, status=error.status, code=error.code, field=name, retry_after=error.retry_after)


def wrong(place: str, message: str) -> RequestRejected:
    return RequestRejected(f"`{place}`: {message}.", code="invalid_value", field=place)


def parse(model: type[BaseModel], body: dict[str, Any]) -> None:
    """
    Raises:
        RequestRejected: names the first field at fault and what it should be.
    """
    try:
        model.model_validate(body)
    except ValidationError as error:
        place, message = first_invalid_field(error)
        missing = error.errors(include_url=False, include_context=False)[0]["type"] == "missing"
        code = "missing_required_parameter" if missing else "invalid_value"
        raise RequestRejected(message, code=code, field=place) from None


def text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise wrong(place, "input should be a string")
    return value


def objects(value: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of a list, each with its place."""
    if not isinstance(value, list):
        raise wrong(place, "input should be a list of objects")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise wrong(f"{place}.{index}", "input should be an object")
        yield entry, f"{place}.{index}"


def blocks(content: Any, place: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The parts of a message's content, each with its place.

    A string is one of text, wherever it stands; so is an object with text and no type. Null says nothing.
    """
    if content is None or isinstance(content, str):
        yield {"type": "text", "text": content or ""}, place
        return
    if not isinstance(content, list):
        raise wrong(place, "input should be a list of objects")
    for index, entry in enumerate(content):
        at = f"{place}.{index}"
        match entry:
            case None:
                continue
            case str():
                yield {"type": "text", "text": entry}, at
            case {"text": str()} if entry.get("type") is None:
                yield {**entry, "type": "text"}, at
            case {"type": "text" | "input_text" | "output_text"} if entry.get("text") is None:
                yield {**entry, "text": ""}, at
            case dict():
                yield entry, at
            case _:
                raise wrong(at, "input should be an object")


def unused(value: Mapping[str, Any], used: Collection[str], within: str = "") -> list[str]:
    """The names of what is set in an object and not used."""
    prefix = f"{within}." if within else ""
    return [f"{prefix}{name}" for name, entry in value.items() if name not in used and entry is not None]


def named(fields: Iterable[str]) -> tuple[str, ...]:
    """Names that a header can carry, sorted, each once."""
    return tuple(sorted({name for name in fields if name.isascii() and name.isprintable() and len(name) <= 64}))


_NAME = 200  # characters of a file's name that a model reads


@dataclass(slots=True)
class Unreadable:
    """Content that no engine reads: refused in the last user message, kept as a line in earlier ones, which every
    later request holds again.

    Args:
        ignored: gets the names of what is kept as a line.
        earlier: the message that is read stands before the last of the user.
    """

    ignored: list[str]
    earlier: bool = False

    def line(self, kind: str, name: Any, place: str, refused: RequestRejected) -> str:
        """The line that a model reads in place of the content.

        Raises:
            RequestRejected: as given, if the user says it now.
        """
        if not self.earlier:
            raise refused
        self.ignored.append(f"{place}.{kind}")
        said = " ".join(name.split())[:_NAME] if isinstance(name, str) else ""
        return f"[{kind}{' ' if said else ''}{said}: not readable here]"


def last_of_user(entries: Any) -> int:
    """The place of the last user message among a request's messages or items; -1 without one."""
    given = entries if isinstance(entries, list) else []
    places = (place for place, entry in enumerate(given) if isinstance(entry, dict) and entry.get("role") == "user")
    return max(places, default=-1)


# Of no use to a model: ids, what others encrypted or signed, and bytes.
_UNREADABLE = frozenset(
    {
        "id",
        "call_id",
        "tool_use_id",
        "status",
        "caller",
        "cache_control",
        "encrypted_content",
        "encrypted_index",
        "encrypted_stdout",
        "signature",
        "fingerprint",
        "data",
        "file_data",
        "result",
        "screenshot",
    }
)


def kept(entry: Mapping[str, Any], place: str) -> str:
    """An entry of a history that chat requests have no word for, as text that a model can read: its type, then JSON.

    Raises:
        RequestRejected: it has a type and nothing else.
    """
    if not entry.keys() - {"type", "role"}:
        raise wrong(f"{place}.type", f"{str(entry.get('type'))[:60]!r} is not known here, and nothing is said with it")
    rest = {name: _readable(value) for name, value in entry.items() if name not in (*_UNREADABLE, "type", "role")}
    said = orjson.dumps({name: value for name, value in rest.items() if value is not None}).decode()
    return f"[{str(entry.get('type'))[:64]}]" + (f" {said}" if said != "{}" else "")


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _readable(inner) for name, inner in value.items() if name not in _UNREADABLE}
    return [_readable(inner) for inner in value] if isinstance(value, list) else value
