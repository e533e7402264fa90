"""The evidence a judge sees of a turn, bounded, between tags that it cannot contain."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count, takewhile
from typing import Literal, TypeAlias

from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.ids import TurnId
from clawloop.core.recipes.recipe import Signal
from clawloop.core.turns.canonical import is_aside, is_volatile, own_words, text_parts, without_time
from clawloop.core.turns.files import for_judges, kind_of_part, references_of
from clawloop.core.turns.thinking import THINKING_PARTS, without_leading_thinking

# Bounds ---------------------------------------------------------------------------------------------------------------
# Truncates long texts in the middle, and divides a budget of characters.
#
# Budgets are in characters, because the judge's tokenizer is not known; a token is at least one character in nearly
# every tokenizer, about four in English.

_MARK = "\n[... {} characters cut ...]\n"
MARK_ROOM = len(_MARK.format(10**12))  # the longest mark: no text has 10^12 characters

SMALLEST_TOTAL = 600  # below this the smallest section has little room beside the mark of a cut


@dataclass(frozen=True, slots=True)
class Budgets:
    """Characters per section of a judge prompt; they add up to `total`.

    The default, 24,000 characters, is 6-8 thousand tokens of English: half a context of 16k, which leaves the other
    half for the judge's thinking.
    """

    task: int = 5_000
    history: int = 4_000
    reply: int = 6_000
    next: int = 7_000
    feedback: int = 2_000

    @property
    def total(self) -> int:
        return self.task + self.history + self.reply + self.next + self.feedback

    @classmethod
    def of(cls, total: int) -> Budgets:
        """Budgets with this total in the default proportions, for a judge with a shorter or longer context."""
        if total < SMALLEST_TOTAL:
            raise ValueError(f"a judge prompt needs at least {SMALLEST_TOTAL} characters, not {total}")
        default = cls()
        return cls(
            task=default.task * total // default.total,
            history=default.history * total // default.total,
            reply=default.reply * total // default.total,
            next=default.next * total // default.total,
            feedback=default.feedback * total // default.total,
        )


DEFAULT_BUDGETS = Budgets()


def cut_middle(text: str, limit: int) -> str:
    """`text` in at most `limit` characters: its beginning and end, and between them how many are cut.

    If the limit has no room for that mark, only the beginning is left.
    """
    if len(text) <= limit:
        return text
    room = limit - MARK_ROOM
    if room <= 0:
        return text[: max(limit, 0)]
    head = (room + 1) // 2
    tail = room - head
    return text[:head] + _MARK.format(len(text) - room) + text[len(text) - tail :]


def share(lengths: Sequence[int], budget: int) -> list[int]:
    """The part of `budget` for each text: short texts get all they need, long ones equal parts of the rest."""
    shares = [0] * len(lengths)
    left = budget
    waiting = sorted(range(len(lengths)), key=lambda index: lengths[index])
    while waiting:
        equal = left // len(waiting)
        index = waiting.pop(0)
        shares[index] = min(lengths[index], equal)
        left -= shares[index]
    return shares


# Tags -----------------------------------------------------------------------------------------------------------------
# Blocks: pieces of evidence between tags that the evidence cannot contain.
#
# Each tag carries a mark of six hexadecimal digits. The mark is derived from the turn id, again and again until no
# block contains it, so no block can close itself, open another or give an answer that needs the mark. The mark is no
# secret: who knows the turn id can compute the marks, but a mark that a text contains is not used.

MARK_DIGITS = 6  # 16.7 million marks: always more than a text of 24,000 characters contains

Role: TypeAlias = Literal["system", "user", "assistant", "tool", "tool_call", "other", "note"]
Section: TypeAlias = Literal["history", "task", "reply", "next", "feedback"]

# Control tokens of chat templates. A judge's tokenizer recognises these strings anywhere, so a text that contains them
# could end its own message. Known families: `<|…|>` (Qwen, Llama 3, Phi, gpt-oss, Cohere), `<｜…｜>` (DeepSeek),
# `[INST]` and `<<SYS>>` (Mistral, Llama 2), angle words (Gemma and others). For a judge whose template has other
# control tokens, add them here.
_CONTROL = re.compile(
    r"<(?=[|｜][^|｜<>\n]{1,64}[|｜]>)"
    r"|<(?=</?SYS>>)"
    r"|<(?=/?(?:s|bos|eos|pad|unk|mask|start_of_turn|end_of_turn|think|tool_call|tool_response|tools)>)"
    r"|\[(?=/?(?:INST|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT|THINK)\])",
    re.IGNORECASE,
)
# Lone surrogates cannot be sent; of the control characters only tabs and line ends have a meaning in a chat.
_UNSENDABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_NOT_HEX = re.compile("[^0-9a-f]")


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of evidence: its section, its author's role, its text, and SHA-256 of the images in it."""

    section: Section
    role: Role
    text: str
    images: tuple[str, ...] = ()


def harmless(text: str) -> str:
    """`text` in the same length, without control tokens of chat templates and unsendable characters."""
    return _CONTROL.sub("(", _UNSENDABLE.sub("�", text))


def has_control_tokens(text: str) -> bool:
    return _CONTROL.search(text) is not None


def choose_mark(turn_id: TurnId, texts: Iterable[str]) -> str:
    """The first mark of this turn that none of `texts` contains; deterministic.

    A text also contains a mark that is written in another case or width, or with other characters between its digits.
    """
    taken: set[str] = set()
    for text in texts:
        digits = _NOT_HEX.sub("", unicodedata.normalize("NFKC", text).casefold())
        taken.update(digits[at : at + MARK_DIGITS] for at in range(len(digits) - MARK_DIGITS + 1))
    return next(mark for attempt in count() if (mark := _mark(turn_id, attempt)) not in taken)


def render(blocks: Sequence[Block], mark: str) -> str:
    """The blocks in order, between tags. Their texts must be harmless, and the mark chosen for them."""
    return "\n".join(
        f"<{block.section} {mark} {block.role}>\n{block.text}\n</{block.section} {mark}>" for block in blocks
    )


def _mark(turn_id: TurnId, attempt: int) -> str:
    digest = blake2b(turn_id.bytes + attempt.to_bytes(8, "big"), person=b"clawloop judge")
    return digest.hexdigest()[:MARK_DIGITS]


# Evidence -------------------------------------------------------------------------------------------------------------
# The evidence a judge sees of a turn: task, recent history, reply, what came next, explicit feedback.
#
# Messages are as clients sent them, so a field may have any shape; content that a judge cannot read (an image, a part
# of unknown type) is named in brackets. System messages and thinking are left out: the former are long and not about
# the reply, the latter was never shown to the user.

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


def words_of(messages: Sequence[Message], comments: Sequence[str]) -> str | None:
    """The user's own words among these messages, and their comments; None if the user has not spoken.

    Only text, so that neither an image, nor what a tool printed or a client put beside or before it, is taken for
    words.
    """
    own = list(filter(_is_own, messages))
    if not own and not comments:
        return None
    said = (without_time("\n".join(text_parts(own_words(message)))) for message in own)
    return "\n\n".join([*said, *comments])


def follows_output(messages: Sequence[Message]) -> bool:
    """True if a tool has printed since the user's own last message, so that the reply may repeat its output."""
    since = takewhile(lambda message: not _is_own(message), reversed(messages))
    return any(_ROLES.get(str(message.get("role"))) == "tool" for message in since)


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


def _is_own(message: Message) -> bool:
    return message.get("role") == "user" and not (is_volatile(message) or is_aside(message))


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
