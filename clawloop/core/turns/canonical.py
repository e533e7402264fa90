"""Canonical form of messages, for comparing them, and digests of that form.

For matching only; engines get the messages unchanged. Never raises for a message of any JSON shape: the API validates
messages.

The digests are stored. A change to this form, or to `encoding`, needs a new `_FORM`, and conversations begun before
are no longer recognised by their messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TypeAlias
from uuid import UUID

import orjson
from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.turns.encoding import encode
from clawloop.core.turns.thinking import THINKING_PARTS, without_any_thinking

_FORM = "clawloop 1"

# (begin, end) of a user message that is added to one request only. OpenClaw escapes both marks in what people type.
# Where text follows the end mark, a person wrote it, and the message is not volatile.
VOLATILE_FRAMES = (("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>", "<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"),)

# Tags of text that clients put beside what a person wrote, and renew, move or leave out when they send it again. Those
# behind the first line are Claude Code's alone, of commands that it ran itself.
_ASIDES = (
    *("system-reminder", "task-notification"),
    *("local-command-caveat", "local-command-stdout", "local-command-stderr", "command-name", "command-message"),
    "command-args",
)
_FRAMES = tuple((f"<{tag}>", f"</{tag}>") for tag in _ASIDES)

# Of what Codex says in a user's name. It sends this again as it was, so that it stays in the digests.
_KEPT_TAGS = (
    *("environment_context", "user_instructions", "recommended_plugins", "skill", "goal_context"),
    *("subagent_notification", "turn_aborted", "user_shell_command"),
)
_WRITTEN_FRAMES = (
    *_FRAMES,
    *((f"<{tag}>", f"</{tag}>") for tag in _KEPT_TAGS),
    *((f"<{tag} ", f"</{tag}>") for tag in ("codex_internal_context", "hook_prompt")),
    ("# AGENTS.md instructions", "</INSTRUCTIONS>"),
)

# OpenClaw puts it before what a person typed: "[Mon 2026-11-23 12:55 UTC] ".
_TIME = re.compile(r"^\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d [^\]\n]{1,40}\] ")

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})

_Frames: TypeAlias = Sequence[tuple[str, str]]

_NOT_ALPHANUMERIC = re.compile(r"[^A-Za-z0-9]+")
_CALL_ID_LENGTH = 40  # OpenClaw replays at most this many letters and digits of a tool-call id
_DIGEST_SIZE = 16  # 128 bits: messages never collide by chance


def is_volatile(message: Message) -> bool:
    """True if the client adds this message to one request and leaves it out of later ones."""
    if message.get("role") != "user":
        return False
    text = "".join(text_parts(message))
    return any(
        text.startswith(begin) and (end not in text or not text.rpartition(end)[2].strip())
        for begin, end in VOLATILE_FRAMES
    )


def without_asides(message: Message) -> Message:
    """A user message without what its client put beside a person's words; unchanged where nothing else is there.

    For comparing messages: what stays as it is when it is sent again is left in.
    """
    return _without(message, _FRAMES)


def own_words(message: Message) -> Message:
    """A user message without all that its client wrote into it; unchanged where a person wrote nothing."""
    return _without(message, _WRITTEN_FRAMES)


def is_aside(message: Message) -> bool:
    """True if a client wrote all of a user message, beside what people write."""
    content = message.get("content")
    texts = text_parts(message)
    whole = isinstance(content, str) or (isinstance(content, list) and len(texts) == len(content))
    said = any(_own_text(text, _WRITTEN_FRAMES) for text in texts)
    return message.get("role") == "user" and whole and any(texts) and not said


def without_time(text: str) -> str:
    """A text without the time that a client put before it."""
    return _TIME.sub("", text)


def text_parts(message: Message) -> list[str]:
    """The texts of a message's content, in order; other parts are left out."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    return [text for text in map(_text_of, parts) if text is not None]


def canonical(message: Message) -> Message:
    """The message in canonical form; idempotent.

    Role developer becomes system, text parts become their text, null becomes the empty string. A user's message loses
    what its client put beside a person's words; an assistant its thinking, the white space around its text, and its
    name. Tool-call ids keep 40 letters and digits; arguments are
    JSON where they parse as an object or array. Other parts stay as they are; unknown fields are left out.
    """
    message = without_asides(message)
    role = message.get("role")
    if role == "developer":
        role = "system"
    plain: Message = {"role": role, "content": _content(message.get("content"), is_assistant=role == "assistant")}
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_call(call) for call in calls] if isinstance(calls, list) else calls
    if message.get("tool_call_id") is not None:
        plain["tool_call_id"] = call_id(message["tool_call_id"])
    if role == "user" and message.get("name"):  # two people in one conversation; clients drop other roles' names
        plain["name"] = message["name"]
    return plain


def seed_digest(namespace: UUID, narrowing: tuple[str, ...]) -> bytes:
    """The digest that all prefixes of the namespace's conversations extend; others share no prefix.

    Args:
        namespace: as `identify.namespace` has it.
    """
    return _digest(encode([_FORM, namespace.hex, *narrowing]))


class History:
    """The messages of a request with their digests, each computed once.

    Args:
        seed: begins the prefix digests of the request's key.
    """

    def __init__(self, seed: bytes, messages: Sequence[Message]) -> None:
        self.seed = seed
        self.messages = messages
        self.prefixes: list[bytes] = []  # entry i is the digest of messages[:i + 1]
        self.alone: dict[int, bytes] = {}  # by place: of each assistant message alone
        digest = seed
        for place, message in enumerate(messages):
            if is_volatile(message):
                self.prefixes.append(digest)
                continue
            encoded = encode(canonical(message))
            digest = _digest(digest + encoded)
            self.prefixes.append(digest)
            if message.get("role") == "assistant":
                self.alone[place] = _digest(encoded)

    def before(self, place: int) -> bytes:
        """The digest of the messages before this one."""
        return self.prefixes[place - 1] if place else self.seed

    @property
    def whole(self) -> bytes:
        """The digest of all messages."""
        return self.prefixes[-1] if self.prefixes else self.seed

    @cached_property
    def replies(self) -> list[bytes]:
        """Prefix digests right after each assistant message, oldest first."""
        return [self.prefixes[place] for place in self.alone]

    @cached_property
    def asked(self) -> list[bytes]:
        """Prefix digests right before each assistant message, oldest first."""
        return [self.before(place) for place in self.alone]

    @cached_property
    def root(self) -> bytes:
        """The digest up to the first user message, which all requests of a conversation share."""
        users = (message.get("role") == "user" and not is_volatile(message) for message in self.messages)
        return next((digest for digest, is_user in zip(self.prefixes, users, strict=True) if is_user), self.whole)


def prefix_digests(seed: bytes, messages: Sequence[Message]) -> list[bytes]:
    """Entry i is the digest of messages[:i + 1]; a volatile message does not change the digest."""
    digests: list[bytes] = []
    digest = seed
    for message in messages:
        digest = extend_digest(digest, message)
        digests.append(digest)
    return digests


def extend_digest(prefix: bytes, message: Message) -> bytes:
    """The digest of a prefix and one more message."""
    if is_volatile(message):
        return prefix
    return _digest(prefix + encode(canonical(message)))  # all prefixes have one length, so this is unambiguous


def response_digest(message: Message) -> bytes:
    """The digest of an assistant message alone."""
    return _digest(encode(canonical(message)))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_SIZE).digest()


def _without(message: Message, frames: _Frames) -> Message:
    content = message.get("content")
    if message.get("role") != "user":
        return message
    if isinstance(content, str):
        return message | {"content": _own_text(content, frames) or content}
    if not isinstance(content, list):
        return message
    own: list[JsonValue] = []
    for part in content:
        text = _text_of(part)
        left = text if text is None else _own_text(text, frames)
        if left == text:
            own.append(part)
        elif left:
            own.append(part | {"text": left} if isinstance(part, dict) else left)
    return message | {"content": own} if any(_text_of(part) != "" for part in own) else message


def _own_text(text: str, frames: _Frames) -> str:
    """The text without the asides at its beginning and at its end; linear in the text."""
    start, stop = _trimmed(text, 0, len(text))
    whole = start, stop
    while (end := _frame_end(text, start, stop, frames)) is not None:
        start, stop = _trimmed(text, end, stop)
    while (begin := _frame_begin(text, start, stop, frames)) is not None:
        start, stop = _trimmed(text, start, begin)
    return text if (start, stop) == whole else text[start:stop]


def _frame_end(text: str, start: int, stop: int, frames: _Frames) -> int | None:
    """End of the aside that begins at `start`; None if none begins there."""
    for begin, end in frames:
        if text.startswith(begin, start, stop):
            found = text.find(end, start, stop)
            return None if found < 0 else found + len(end)
    return None


def _frame_begin(text: str, start: int, stop: int, frames: _Frames) -> int | None:
    """Begin of the aside that ends at `stop`; None if none ends there."""
    for begin, end in frames:
        if text.endswith(end, start, stop):
            found = text.rfind(begin, start, stop)
            return None if found < 0 or text.find(end, found, stop) != stop - len(end) else found
    return None


def _trimmed(text: str, start: int, stop: int) -> tuple[int, int]:
    while start < stop and text[start].isspace():
        start += 1
    while start < stop and text[stop - 1].isspace():
        stop -= 1
    return start, stop


def _text_of(part: JsonValue) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and str(part.get("type")) in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]  # type: ignore[return-value]
    return None


def _content(content: JsonValue, *, is_assistant: bool) -> JsonValue:
    """One text if all parts are text; otherwise the parts, with neighbouring texts joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return without_any_thinking(content) if is_assistant else content
    if not isinstance(content, list):
        return content
    parts: list[JsonValue] = []
    run: list[str] = []

    def close_run() -> None:
        text = "".join(run)
        run.clear()
        if text := without_any_thinking(text) if is_assistant else text:
            parts.append({"type": "text", "text": text})

    for part in content:
        text = _text_of(part)
        if text is not None:
            run.append(text)
        elif not (is_assistant and isinstance(part, dict) and str(part.get("type")) in THINKING_PARTS):
            close_run()
            parts.append(part)
    close_run()
    if not parts:
        return ""
    return _text_of(parts[0]) or parts if len(parts) == 1 else parts


def _call(call: JsonValue) -> JsonValue:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    return {
        "id": call_id(call.get("id")),
        "function": {"name": function.get("name"), "arguments": arguments_of(function.get("arguments"))},
    }


def call_id(value: JsonValue) -> JsonValue:
    if value is None:
        return ""
    return _NOT_ALPHANUMERIC.sub("", value)[:_CALL_ID_LENGTH] if isinstance(value, str) else value


def arguments_of(arguments: JsonValue) -> JsonValue:
    """Arguments as JSON. Clients write no arguments as an empty string, null or {}."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    text = arguments.strip()
    try:
        value: JsonValue = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text or {}
    return value if isinstance(value, dict | list) else text


# Of a reply with neither text nor tool calls, such as thinking that was cut short: says nothing about who wrote it.
EMPTY_RESPONSE = response_digest({"role": "assistant", "content": ""})
