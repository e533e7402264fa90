"""Which session a request says it belongs to.

Knows nothing about known conversations (`conversation`) or storage. Reads bodies that nobody has validated:
what is absent, empty or of the wrong type says nothing here; the API refuses wrong types by itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from uuid import uuid5

from pydantic import JsonValue

from clawloop.contracts.turns import Message, SessionEvidence, SessionSource
from clawloop.ids import ApiKeyId, SessionId, TurnId
from clawloop.turns.canonical import is_volatile, text_parts

# Two spellings of one value mean one session only inside a family: a client that says the same thing in another
# place, or begins to send OpenClaw's affinity header, goes on in its session.
_FAMILIES = {
    SessionSource.HEADER: "client",
    SessionSource.BODY: "client",
    SessionSource.METADATA: "client",
    SessionSource.AFFINITY: "openclaw",
    SessionSource.CACHE_KEY: "openclaw",
    SessionSource.OPENCLAW: "openclaw",
}

_MAX_VALUE = 256  # characters; fits an index, and no client we know comes near
_AFFINITY = re.compile(r"(?P<id>.+):[0-9]{1,6}", re.DOTALL)  # <id>:<N>, N counts OpenClaw's compactions
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_OPENCLAW_ID = 60  # OpenClaw cuts `<id>:<N>` and the bare id at 64; so much of the id is in both for N < 1000

_RUNTIME_FIELD = re.compile(r"[A-Za-z_]+=.*")
_DONE = frozenset({"1", "true", "yes", "on"})


def identify(headers: Mapping[str, str], body: Mapping[str, JsonValue]) -> SessionEvidence:
    """The first thing a request says about its session, in the order of `SessionSource`.

    Header names are lower-case. A value that is longer than 256 characters or not plain text is replaced by
    its SHA-256, so that it still names one session and can be stored anywhere.
    """
    metadata = body.get("metadata")
    found = (
        (SessionSource.HEADER, headers.get("x-session-id")),
        (SessionSource.AFFINITY, _affinity(headers)),
        (SessionSource.CACHE_KEY, _uuid_of(body.get("prompt_cache_key"))),
        (SessionSource.BODY, body.get("session_id")),
        (SessionSource.METADATA, metadata.get("session_id") if isinstance(metadata, dict) else None),
        (SessionSource.OPENCLAW, _openclaw_line(body.get("messages"))),
    )
    for source, said in found:
        if value := _plain(said):
            return SessionEvidence(source, value)
    narrowing = tuple(
        f"{field}={value}"
        for field in ("user", "safety_identifier", "prompt_cache_key")
        if (value := _plain(body.get(field)))
    )
    return SessionEvidence(SessionSource.CONVERSATION, None, narrowing)


def named_session_id(key: ApiKeyId, evidence: SessionEvidence) -> SessionId:
    """The session a value names for this key; the same value of another key is another session.

    Raises:
        ValueError: nothing named it.
    """
    if evidence.value is None:
        raise ValueError(f"{evidence.source}: no value names this session")
    return SessionId(uuid5(key, f"{_FAMILIES[evidence.source]}:{evidence.value}"))


def conversation_session_id(first_turn: TurnId) -> SessionId:
    """The session of a conversation that nothing names but its first turn."""
    return SessionId(uuid5(first_turn, "conversation"))


def ends_session(headers: Mapping[str, str], body: Mapping[str, JsonValue]) -> bool:
    """Whether the client says that its session ends with this turn."""
    return _says_done(headers.get("x-session-done")) or _says_done(body.get("session_done"))


def _says_done(said: JsonValue) -> bool:
    if isinstance(said, str):
        return said.strip().lower() in _DONE
    return isinstance(said, bool | int) and said == 1


def _plain(said: JsonValue) -> str | None:
    value = said.strip() if isinstance(said, str) else ""
    if not value:
        return None
    if len(value) <= _MAX_VALUE and value.isprintable():
        return value
    return f"sha256:{sha256(value.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _affinity(headers: Mapping[str, str]) -> str | None:
    """The id in `x-session-affinity`.

    `:N` is taken off after a UUID. OpenClaw's ids are not always UUIDs (`--session-id demo`); it is known by
    repeating the value in `x-client-request-id`. Other clients' values may well end in `:N` and mean it.
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


def _openclaw_line(messages: JsonValue) -> str | None:
    """The id in the line OpenClaw puts at the end of a conversation's first user message.

    Only that line counts, and only in its whole form: text that people quote, in the middle or later on, must
    not move a conversation into another session.
    """
    first = _first_user_message(messages)
    parts = text_parts(first) if first else []
    lines = parts[-1].rstrip().rsplit("\n", 1) if parts else [""]
    head, _, line = lines[-1].partition("Runtime: ")
    fields = line.split(" | ")
    if head or not all(_RUNTIME_FIELD.fullmatch(field) for field in fields):
        return None
    said = dict(field.split("=", 1) for field in fields)
    session_id = said.get("sessionId", "")
    if not said.get("session", "").startswith("agent:") or re.search(r"\s", session_id):
        return None
    uuid = _uuid_of(f"{session_id}:0")
    return uuid or session_id[:_OPENCLAW_ID]


def _first_user_message(messages: JsonValue) -> Message | None:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and not is_volatile(message):
            return message
    return None
