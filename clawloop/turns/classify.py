"""Classifies a turn as main or side, with the reason.

Reads request bodies before they are validated. The patterns are the openings of prompts that clients send without a
person; no person's message begins so by chance, and one that quotes such a prompt has other text in front.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from clawloop.contracts.turns import KindDecision, Message, TurnKind
from clawloop.turns.canonical import is_volatile, text_parts

_STAMP = re.compile(r"\[[A-Z][a-z]{2} \d{4}-\d\d-\d\d \d\d:\d\d [^\]\n]{1,40}\] ")  # OpenClaw puts it before user text


_KINDS = {kind.value: kind for kind in TurnKind}


@dataclass(frozen=True, slots=True)
class SidePattern:
    """How one kind of side prompt is recognised.

    Args:
        name: for people.
        place: the message to match: the system message that opens a request without tools; or the last user message,
            which also covers the tool calls that follow it.
        begins: how the message's text begins.
        contains: what the text must contain as well.
    """

    name: str
    place: Literal["system", "user"]
    begins: str
    contains: tuple[str, ...] = ()


SIDE_PATTERNS = (
    # OpenClaw 2026.9; the second heartbeat is that of 2026.3 and before.
    SidePattern(
        "heartbeat", "user", "Follow the heartbeat monitor scratch context when provided.", ("reply NO_REPLY",)
    ),
    SidePattern("heartbeat", "user", "Read HEARTBEAT.md if it exists", ("reply HEARTBEAT_OK",)),
    SidePattern("heartbeat", "user", "[OpenClaw heartbeat poll]"),  # a heartbeat in the history
    SidePattern("memory flush", "user", "Pre-compaction memory flush.", ("durable memories", "NO_REPLY")),
    SidePattern(
        "compaction",
        "system",
        "You are a context summarization assistant.",
        ("ONLY output the structured summary",),
    ),
    SidePattern("title", "system", "Generate a concise session title (", ("Return only the title",)),
    SidePattern("recap", "system", "Write an Activity recap for someone scanning their tasks"),
    # OpenCode.
    SidePattern("title", "system", "You are a title generator. You output ONLY a thread title."),
    # Open WebUI.
    SidePattern("title", "user", "### Task:\nGenerate a concise, 3-5 word title", ("<chat_history>",)),
    SidePattern("tags", "user", "### Task:\nGenerate 1-3 broad tags", ("<chat_history>",)),
    SidePattern("follow-ups", "user", "### Task:\nSuggest 3-5 relevant follow-up", ("<chat_history>",)),
)


def classify(
    headers: Mapping[str, str], body: Mapping[str, JsonValue], *, side_alias: bool, patterns: bool = True
) -> KindDecision:
    """The kind of a turn: as the client names it, else by the model alias, else by a known side prompt, else main.

    Args:
        headers: names in lower case.
        side_alias: the request names a model alias that means side turns.
        patterns: False ignores known side prompts: an episode is trained whatever its task reads like.
    """
    unknown = ""
    for place, value in (
        ("header X-Turn-Type", headers.get("x-turn-type")),
        ("body turn_type", body.get("turn_type")),
    ):
        if not isinstance(value, str) or not value.strip():
            continue
        name = value.strip().lower()
        if name in _KINDS:
            return KindDecision(_KINDS[name], f"{place}: {name}{unknown}")
        unknown += f" ({place} {value.strip()[:40]!r} is neither main nor side)"
    if side_alias:
        return KindDecision(TurnKind.SIDE, f"model name for side turns{unknown}")
    pattern = _side_pattern(body) if patterns else None
    if pattern is not None:
        return KindDecision(TurnKind.SIDE, f"known side prompt: {pattern}{unknown}")
    return KindDecision(TurnKind.MAIN, f"no sign of a side turn{unknown}")


def is_side_prompt(message: Message) -> bool:
    """True if a message in a history is a client's own prompt for a side turn, whether its reply is there or not."""
    return message.get("role") == "user" and _match("user", _user_text(message)) is not None


def _side_pattern(body: Mapping[str, JsonValue]) -> str | None:
    raw = body.get("messages")
    messages = [message for message in raw if isinstance(message, dict)] if isinstance(raw, list) else []
    opening = messages[0] if messages and messages[0].get("role") in ("system", "developer") else None
    if opening is not None and not body.get("tools"):
        pattern = _match("system", "".join(text_parts(opening)).lstrip())
        if pattern is not None:
            return pattern
    users = (m for m in reversed(messages) if m.get("role") == "user" and not is_volatile(m))
    last = next(users, None)
    return _match("user", _user_text(last)) if last is not None else None


def _match(place: Literal["system", "user"], text: str) -> str | None:
    for pattern in SIDE_PATTERNS:
        begins = pattern.place == place and text.startswith(pattern.begins)
        if begins and all(part in text for part in pattern.contains):
            return pattern.name
    return None


def _user_text(message: Message) -> str:
    text = "".join(text_parts(message)).lstrip()
    stamp = _STAMP.match(text)
    return text[stamp.end() :] if stamp else text
