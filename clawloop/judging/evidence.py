"""What a judge gets to see of a turn: task, recent history, reply, what came next, explicit feedback.

Knows nothing about wording. Messages come as clients send them, so every field may have any shape; what a
judge cannot read (an image, a field of an unknown kind) is named in brackets. System messages and thinking
are left out: the first are the client's business and long, the second was never shown to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from clawloop.contracts.turns import Message
from clawloop.judging.blocks import Block, Role, Section, harmless
from clawloop.judging.truncation import Budgets, cut_middle, share
from clawloop.turns.thinking import THINKING_PARTS, without_leading_thinking

MAX_HISTORY = 8  # messages: enough to see what a short request refers to
MAX_PIECES = 12  # per section: many parallel tool results are shown by the first and the last

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_PART_NAMES = frozenset({"image_url", "image", "input_image", "input_audio", "audio", "video_url", "file"})


@dataclass(frozen=True, slots=True)
class Said:
    """A text and who said it."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What there is to judge a turn by, uncut.

    Args:
        before: messages before the task, in order.
        task: the last user message that is not volatile; None if there is none.
        since: messages between the task and the reply: tool calls and their results.
        reply: the text of the response and its tool calls.
        next_state: every message that followed; empty if only feedback is known.
        feedback: what the user said about the reply outside the conversation; None if nothing.
    """

    before: tuple[Said, ...]
    task: Said | None
    since: tuple[Said, ...]
    reply: tuple[Said, ...]
    next_state: tuple[Said, ...]
    feedback: str | None


def gather(
    messages: Sequence[Message],
    response: Message,
    next_state: Sequence[Message],
    feedback: str | None = None,
    *,
    is_volatile: Callable[[Message], bool],
) -> Evidence:
    """The evidence of a turn: its request's messages, its response, and what is known to have come after."""
    lasting = [
        message for message in messages if not is_volatile(message) and _ROLES.get(str(message.get("role"))) != "system"
    ]
    at = next((i for i in reversed(range(len(lasting))) if lasting[i].get("role") == "user"), None)
    before, since = (lasting, []) if at is None else (lasting[:at], lasting[at + 1 :])
    return Evidence(
        before=_said(before[-MAX_HISTORY:]),
        task=None if at is None else Said("user", content_text(lasting[at].get("content"))),
        since=_said(since[-MAX_HISTORY:]),
        reply=_said([response | {"role": "assistant"}]) or (Said("assistant", ""),),
        next_state=_said([message for message in next_state if not is_volatile(message)]),
        feedback=feedback,
    )


def content_text(content: JsonValue) -> str:
    """The text of a message's content, without thinking; parts that are no text are named in brackets."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content if not _is_thinking(part))
    return "" if content is None else "[unreadable]"


def blocks_of(evidence: Evidence, budgets: Budgets) -> list[Block]:
    """The evidence in the order in which it happened, each section cut to its budget."""
    tail = [*(("before", said) for said in evidence.before), *(("since", said) for said in evidence.since)]
    tail = tail[-MAX_HISTORY:]
    history = _section("history", [said for _, said in tail], budgets.history)
    split = sum(1 for place, _ in tail if place == "before")
    return [
        *history[:split],
        *_section("task", [evidence.task] if evidence.task else [], budgets.task),
        *history[split:],
        *_section("reply", _ends(evidence.reply), budgets.reply),
        *_section("next", _ends(evidence.next_state), budgets.next),
        *_section("feedback", [Said("user", evidence.feedback)] if evidence.feedback else [], budgets.feedback),
    ]


def _section(section: Section, pieces: Sequence[Said], budget: int) -> list[Block]:
    shares = share([len(piece.text) for piece in pieces], budget)
    # Cut first: making harmless keeps the length, and reads only what is left.
    return [
        Block(section, piece.role, harmless(cut_middle(piece.text, room)))
        for piece, room in zip(pieces, shares, strict=True)
    ]


def _ends(pieces: Sequence[Said]) -> list[Said]:
    if len(pieces) <= MAX_PIECES:
        return list(pieces)
    half = MAX_PIECES // 2
    note = Said("note", f"{len(pieces) - 2 * half} more are not shown")
    return [*pieces[:half], note, *pieces[-half:]]


def _said(messages: Sequence[Message]) -> tuple[Said, ...]:
    return tuple(said for message in messages for said in _said_in(message))


def _said_in(message: Message) -> list[Said]:
    role = _ROLES.get(str(message.get("role")), "other")
    text = content_text(message.get("content"))
    if role != "assistant":
        return [Said(role, text)]
    refusal = message.get("refusal")
    text = without_leading_thinking(text) or (refusal if isinstance(refusal, str) else "")
    calls = message.get("tool_calls")
    said = [Said("tool_call", _call_text(call)) for call in calls] if isinstance(calls, list) else []
    return [Said("assistant", text.strip()), *said] if text.strip() or not said else said


def _call_text(call: JsonValue) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return "[unreadable]"
    return f"{function.get('name')} {function.get('arguments')}"


def _is_thinking(part: JsonValue) -> bool:
    return isinstance(part, dict) and str(part.get("type")) in THINKING_PARTS


def _part_text(part: JsonValue) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text")
        if isinstance(text, str):
            return text
        kind = part.get("type")
        if isinstance(kind, str) and kind in _PART_NAMES:
            return f"[{kind}]"
    return "[unreadable]"
