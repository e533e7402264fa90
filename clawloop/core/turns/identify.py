"""Finds what names a request's session.

Reads request bodies before they are validated: a value that is absent, empty or of the wrong type is ignored here; the
API rejects wrong types. For requests without a name see `conversation`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from uuid import UUID, uuid5

from pydantic import JsonValue

from clawloop.core.contracts.turns import Message, SessionEvidence, SessionSource
from clawloop.core.ids import ApiKeyId, SessionId, TurnId
from clawloop.core.turns.canonical import History, is_volatile, text_parts

# The same value in two places names one session only within a family: a client that moves the value to another place,
# or begins to send OpenClaw's affinity header, or whose body says what a proxy dropped, continues its session.
_FAMILIES = {
    SessionSource.HEADER: "client",
    SessionSource.BODY: "client",
    SessionSource.METADATA: "client",
    SessionSource.CLAUDE_CODE: "client",
    SessionSource.AFFINITY: "agent",
    SessionSource.THREAD: "agent",
    SessionSource.CODEX_SESSION: "agent",
    SessionSource.CACHE_KEY: "agent",
    SessionSource.OPENCLAW: "agent",
}

_MAX_VALUE = 256  # characters; fits an index, and known clients send far less
_AFFINITY = re.compile(r"(?P<id>.+):[0-9]{1,6}", re.DOTALL)  # <id>:<N>, N counts OpenClaw's compactions
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
# As Codex has named them, the newest first.
_CODEX_SESSIONS = ("session-id", "conversation_id", "session_id")
_OPENING_DIGITS = 12
_OPENCLAW_ID = 60  # OpenClaw cuts `<id>:<N>` and the bare id at 64; for N < 1000 both hold this much of the id

# OpenClaw's line has some hundred; two million fields held a gateway for 0.65 s.
_RUNTIME_CHARACTERS = 16 * 1024
_RUNTIME_FIELD = re.compile(r"[A-Za-z_]+=.*")
_TRUE = frozenset({"1", "true", "yes", "on"})


def identify(headers: Mapping[str, str], body: Mapping[str, JsonValue]) -> SessionEvidence:
    """The first value that names the request's session, in the order of docs/learning.md.

    A value that is longer than 256 characters or not printable is replaced by its SHA-256, so that it still names one
    session and can be stored anywhere.

    Args:
        headers: names in lower case.
    """
    metadata = body.get("metadata")
    codex = body.get("client_metadata")
    said = codex if isinstance(codex, dict) else {}
    codex_session = next((headers[name] for name in _CODEX_SESSIONS if headers.get(name)), said.get("session_id"))
    values = (
        (SessionSource.HEADER, headers.get("x-session-id")),
        (SessionSource.AFFINITY, _affinity(headers)),
        # Codex's sub-agents have a thread of their own, and their parent's session and cache key.
        (SessionSource.THREAD, _any_uuid(headers.get("thread-id") or said.get("thread_id"))),
        (SessionSource.CODEX_SESSION, _any_uuid(codex_session)),
        (SessionSource.CLAUDE_CODE, headers.get("x-claude-code-session-id")),
        (SessionSource.CACHE_KEY, _uuid_of(body.get("prompt_cache_key"))),
        (SessionSource.BODY, body.get("session_id")),
        (SessionSource.METADATA, metadata.get("session_id") if isinstance(metadata, dict) else None),
        (SessionSource.CACHE_KEY, _key_and_opening(body)),
        (SessionSource.OPENCLAW, _openclaw_line(body.get("messages"))),
    )
    for source, raw in values:
        if value := _plain(raw):
            return SessionEvidence(source, value)
    narrowing = tuple(
        f"{field}={value}"
        for field in ("user", "safety_identifier", "prompt_cache_key")
        if (value := _plain(body.get(field)))
    )
    return SessionEvidence(SessionSource.CONVERSATION, None, narrowing)


def namespace(key: ApiKeyId, evidence: SessionEvidence) -> UUID:
    """The namespace of sessions and message prefixes: the key, or the key with the policy that a header chose.

    So a header never moves a conversation into a session of another policy.
    """
    return key if evidence.policy is None else uuid5(key, f"policy:{evidence.policy}")


def named_session_id(key: ApiKeyId, evidence: SessionEvidence) -> SessionId:
    """The session that the evidence names; the same value of another key or chosen policy is another session.

    Raises:
        ValueError: the evidence has no value.
    """
    if evidence.value is None:
        raise ValueError(f"{evidence.source}: no value names this session")
    return SessionId(uuid5(namespace(key, evidence), f"{_FAMILIES[evidence.source]}:{evidence.value}"))


def conversation_session_id(first_turn: TurnId) -> SessionId:
    """The session of a conversation that only its first turn names."""
    return SessionId(uuid5(first_turn, "conversation"))


def ends_session(headers: Mapping[str, str], body: Mapping[str, JsonValue]) -> bool:
    """True if the client marks this turn as its session's last."""
    return _is_true(headers.get("x-session-done")) or _is_true(body.get("session_done"))


def _is_true(value: JsonValue) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in _TRUE
    return isinstance(value, bool | int) and value == 1


def _plain(raw: JsonValue) -> str | None:
    value = raw.strip() if isinstance(raw, str) else ""
    if not value:
        return None
    if len(value) <= _MAX_VALUE and value.isprintable():
        return value
    return f"sha256:{sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _affinity(headers: Mapping[str, str]) -> str | None:
    """The id in `x-session-affinity`.

    `:N` is removed after a UUID. OpenClaw's ids are not always UUIDs (`--session-id demo`); OpenClaw is recognised by
    the same value in `x-client-request-id`. Other clients' values may end in `:N` as part of the id.
    """
    value = headers.get("x-session-affinity", "").strip()
    if uuid := _uuid_of(value) or _uuid_of(f"{value}:0"):
        return uuid
    if value and headers.get("x-client-request-id", "").strip() == value:
        counted = _AFFINITY.fullmatch(value)
        return (counted["id"] if counted else value)[:_OPENCLAW_ID]
    return value


def _uuid_of(value: JsonValue) -> str | None:
    """The UUID in `<uuid>:<N>`; None for any other form."""
    counted = _AFFINITY.fullmatch(value.strip()) if isinstance(value, str) else None
    return counted["id"].lower() if counted and _UUID.fullmatch(counted["id"]) else None


def _any_uuid(value: JsonValue) -> str | None:
    """The UUID in `<uuid>` or `<uuid>:<N>`; None for any other form."""
    return _uuid_of(f"{value.strip()}:0") or _uuid_of(value) if isinstance(value, str) else None


def _key_and_opening(body: Mapping[str, JsonValue]) -> str | None:
    """The UUID in `prompt_cache_key` with a digest of how the conversation begins.

    Codex has a key for each conversation, and keeps its beginning when it compacts one; another client may have one
    key for all. It is not the session that Codex's headers name.
    """
    uuid, raw = _any_uuid(body.get("prompt_cache_key")), body.get("messages")
    first = _first_user_message(raw)
    if uuid is None or first is None or not isinstance(raw, list):
        return uuid
    place = next(place for place, message in enumerate(raw) if message is first)
    opening = History(b"", [message for message in raw[: place + 1] if isinstance(message, dict)]).whole
    return f"{uuid}/{opening.hex()[:_OPENING_DIGITS]}"


def _openclaw_line(messages: JsonValue) -> str | None:
    """The id in the line that OpenClaw puts at the end of a conversation's first user message.

    Only that line in its complete form counts: text that people quote, in the middle or in later messages, must not
    move a conversation into another session.
    """
    first = _first_user_message(messages)
    parts = text_parts(first) if first else []
    lines = parts[-1].rstrip().rsplit("\n", 1) if parts else [""]
    head, _, line = lines[-1].partition("Runtime: ")
    fields = line[: _RUNTIME_CHARACTERS + 1].split(" | ")
    if head or len(line) > _RUNTIME_CHARACTERS or not all(_RUNTIME_FIELD.fullmatch(field) for field in fields):
        return None
    runtime = dict(field.split("=", 1) for field in fields)
    session_id = runtime.get("sessionId", "")
    if not runtime.get("session", "").startswith("agent:") or re.search(r"\s", session_id):
        return None
    uuid = _uuid_of(f"{session_id}:0")
    return uuid or session_id[:_OPENCLAW_ID]


def _first_user_message(messages: JsonValue) -> Message | None:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and not is_volatile(message):
            return message
    return None
