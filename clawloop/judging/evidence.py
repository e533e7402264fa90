"""The evidence a judge sees of a turn: task, recent history, reply, what came next, explicit feedback.

Messages are as clients sent them, so a field may have any shape; content that a judge cannot read (an image, a part of
unknown type) is named in brackets. System messages and thinking are left out: the former are long and not about the
reply, the latter was never shown to the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from clawloop.contracts.turns import Message
from clawloop.judging.blocks import Block, Role, Section, harmless
from clawloop.judging.truncation import Budgets, cut_middle, share
from clawloop.recipes.recipe import Signal
from clawloop.turns.canonical import is_volatile
from clawloop.turns.files import references_of
from clawloop.turns.part_names import for_judges, kind_of_part
from clawloop.turns.thinking import THINKING_PARTS, without_leading_thinking

MAX_HISTORY = 8  # messages: enough to understand a short request
MAX_PIECES = 12  # per section: of many parallel tool results the first and the last ones are shown

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_SPEAKERS: frozenset[Role] = frozenset({"user", "assistant", "tool_call", "note"})


@dataclass(frozen=True, slots=True)
class Statement:
    """A text and its author's role, and SHA-256 of the images that the text names."""

    role: Role
    text: str
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything to judge a turn by, not truncated.

    Args:
        before: messages before the task, in order.
        task: the last user message that is not volatile; None if there is none.
        since: messages between the task and the reply: tool calls and their results.
        reply: the text of the response and its tool calls.
        next_state: the messages that followed; empty if there is only feedback.
        feedback: the texts of the user's feedback; None if there are none.
    """

    before: tuple[Statement, ...]
    task: Statement | None
    since: tuple[Statement, ...]
    reply: tuple[Statement, ...]
    next_state: tuple[Statement, ...]
    feedback: str | None


def gather(
    messages: Sequence[Message],
    response: Message,
    next_state: Sequence[Message],
    feedback: str | None = None,
) -> Evidence:
    """The evidence of a turn: its request's messages, its response, its next state and feedback."""
    lasting = [
        message for message in messages if not is_volatile(message) and _ROLES.get(str(message.get("role"))) != "system"
    ]
    at = next((i for i in reversed(range(len(lasting))) if lasting[i].get("role") == "user"), None)
    before, since = (lasting, []) if at is None else (lasting[:at], lasting[at + 1 :])
    return Evidence(
        before=_statements(before[-MAX_HISTORY:]),
        task=None if at is None else _statement("user", lasting[at]),
        since=_statements(since[-MAX_HISTORY:]),
        reply=_statements([response | {"role": "assistant"}]) or (Statement("assistant", ""),),
        next_state=_statements([message for message in next_state if not is_volatile(message)]),
        feedback=feedback,
    )


def words_of_user(evidence: Evidence) -> Evidence | None:
    """The evidence without what tools, and others than user and assistant, wrote.

    None if the user has not spoken since the reply.
    """
    spoken = tuple(statement for statement in evidence.next_state if statement.role == "user")
    if not evidence.feedback and not any(statement.text.strip() for statement in spoken):
        return None
    return replace(
        evidence, before=_without_output(evidence.before), since=_without_output(evidence.since), next_state=spoken
    )


def hint_evidence(evidence: Evidence, signal: Signal) -> Evidence | None:
    """Evidence shown to the judge of hints under a recipe; None: the user has not spoken, so no hint is asked for."""
    return evidence if rests_on_tools(signal) else words_of_user(evidence)


def rests_on_tools(signal: Signal) -> bool:
    return signal.hints_from == "any"


def content_text(content: JsonValue) -> str:
    """The text of a message's content, without thinking; other parts are named in brackets."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content if not _is_thinking(part))
    return "" if content is None else "[unreadable]"


def blocks_of(evidence: Evidence, budgets: Budgets) -> list[Block]:
    """The evidence in chronological order, each section truncated to its budget."""
    newest = [*evidence.before, *evidence.since][-MAX_HISTORY:]
    history = _section("history", newest, budgets.history)
    split = max(len(newest) - len(evidence.since), 0)
    return [
        *history[:split],
        *_section("task", [evidence.task] if evidence.task else [], budgets.task),
        *history[split:],
        *_section("reply", _ends(evidence.reply), budgets.reply),
        *_section("next", _ends(evidence.next_state), budgets.next),
        *_section("feedback", [Statement("user", evidence.feedback)] if evidence.feedback else [], budgets.feedback),
    ]


def _without_output(statements: Sequence[Statement]) -> tuple[Statement, ...]:
    return tuple(
        statement if statement.role in _SPEAKERS else Statement("note", "output that is not shown")
        for statement in statements
    )


def _section(section: Section, pieces: Sequence[Statement], budget: int) -> list[Block]:
    shares = share([len(piece.text) for piece in pieces], budget)
    # Truncate first: `harmless` keeps the length, and is slow on long texts.
    return [
        Block(section, piece.role, harmless(cut_middle(piece.text, room)), piece.images)
        for piece, room in zip(pieces, shares, strict=True)
    ]


def _ends(pieces: Sequence[Statement]) -> list[Statement]:
    if len(pieces) <= MAX_PIECES:
        return list(pieces)
    half = MAX_PIECES // 2
    note = Statement("note", f"{len(pieces) - 2 * half} more are not shown")
    return [*pieces[:half], note, *pieces[-half:]]


def _statements(messages: Sequence[Message]) -> tuple[Statement, ...]:
    return tuple(statement for message in messages for statement in _statements_in(message))


def _statements_in(message: Message) -> list[Statement]:
    role = _ROLES.get(str(message.get("role")), "other")
    if role != "assistant":
        return [_statement(role, message)]
    text = content_text(message.get("content"))
    refusal = message.get("refusal")
    text = without_leading_thinking(text) or (refusal if isinstance(refusal, str) else "")
    calls = message.get("tool_calls")
    tool_calls = [Statement("tool_call", _call_text(call)) for call in calls] if isinstance(calls, list) else []
    return [Statement("assistant", text.strip()), *tool_calls] if text.strip() or not tool_calls else tool_calls


def _statement(role: Role, message: Message) -> Statement:
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    images = [each.sha256 for part in parts if kind_of_part(part) == "image" for each in references_of(part)]
    return Statement(role, content_text(content), tuple(images))


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
        if (said := for_judges(part)) is not None:
            return f"[{said}]"
    return "[unreadable]"
