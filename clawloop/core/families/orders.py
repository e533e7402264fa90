"""The orders of roles that a chat template takes, and a conversation brought into one of them.

Templates refuse an order, or lose a message without a word: Qwen3's drops those of a developer, gpt-oss's every system
message but the first. `probing` asks a template once, by renderings alone, so that it serves a template's text and an
engine's `/tokenize`. `request_as_sent` is the pure function by which whatever asks an engine sends a chat (`serving/`).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

ChatMessage: TypeAlias = dict[str, Any]
# Token ids, or text; None: refused.
Rendered: TypeAlias = Sequence[object] | None

BETWEEN = "\n\n"
# Among a turn's sampling settings: the rules by which its messages were changed.
SENT_BY = "sent_by"


class Rule(StrEnum):
    """A change that a template needs. The values are recorded with turns."""

    DEVELOPER = "developer is system"
    SYSTEM = "system is user text"
    LEADING = "leading system messages are one"
    LATE = "later system messages are user text"
    NO_USER = "a system message alone is user text"
    TOOLS = "no tools"  # calls and results in the history are text
    USERS = "user messages in a row are one"
    REPLIES = "replies in a row are one"
    AFTER_TOOL = "user text after a result is in it"


OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
_PAIRS = {
    ("user", "user"): Rule.USERS,
    ("assistant", "assistant"): Rule.REPLIES,
    ("tool", "user"): Rule.AFTER_TOOL,
}


@dataclass(frozen=True, slots=True)
class Probe:
    """A chat to be rendered with the prompt for a reply."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None


def as_sent(messages: Sequence[ChatMessage], rules: Collection[str]) -> Sequence[ChatMessage]:
    """The messages in an order that the template takes; the same object if nothing is to be changed.

    No text is lost and none moves: what stands before a message is the same in each request of a conversation, so that
    the beginning of the prompt is, too.

    Args:
        rules: of the template, see `Rule`.
    """
    if not rules or not _changes(messages, rules):
        return messages
    sent: list[ChatMessage] = []
    leading = True
    for given in messages:
        message = _without_tools(given) if Rule.TOOLS in rules else given
        if message.get("role") == "developer" and Rule.DEVELOPER in rules:
            message = message | {"role": "system"}
        leading = leading and message.get("role") in ("system", "developer")
        if message.get("role") == "system":
            if leading and Rule.SYSTEM not in rules:
                if sent and Rule.LEADING in rules:
                    sent[-1] = _joined(sent[-1], message)
                else:
                    sent.append(message)
                continue
            if Rule.SYSTEM in rules or Rule.LATE in rules:
                message = _as_user_text(message, "system")
        rule = _PAIRS.get((str(sent[-1].get("role")), str(message.get("role")))) if sent else None
        if rule is None or rule not in rules:
            sent.append(message)
        elif rule is Rule.AFTER_TOOL and given.get("role") == "user":
            sent[-1] = _joined(sent[-1], _as_user_text(message, "user"))
        else:
            sent[-1] = _joined(sent[-1], message)
    if Rule.NO_USER in rules and all(message.get("role") in ("system", "developer") for message in sent):
        sent[-1] = _as_user_text(sent[-1], "system")
    return sent


def request_as_sent(body: dict[str, Any], rules: Collection[str]) -> dict[str, Any]:
    """The body of a chat request as the template takes it; the same object if nothing is to be changed.

    Tools that the template knows nothing of, and that the model need not call, are left out.
    """
    sent = body
    if Rule.TOOLS in rules and "tools" in body and body.get("tool_choice") in (None, "auto", "none"):
        sent = {name: value for name, value in body.items() if name not in OF_TOOLS}
    if isinstance(messages := body.get("messages"), list):
        ordered = as_sent(messages, rules)
        if ordered is not messages:
            sent = sent | {"messages": list(ordered)}
    return sent


def probing() -> Generator[Probe, Rendered, frozenset[Rule]]:
    """Yields chats, is sent what each renders to, and returns the rules.

    A message is taken where another text of it changes what is rendered, and behind the place where another text of
    the message before it does. Each rule is asked for with the rules before it applied.
    """
    rules: set[Rule] = set()
    if not (yield from _takes((("user", 1),), rules)):
        return frozenset()  # it renders no text that can be told apart
    for rule, orders in _ORDERS:
        if rule is Rule.AFTER_TOOL and Rule.TOOLS in rules:
            continue
        for order in orders:
            if not (yield from _takes(order, rules)):
                rules.add(rule)
                break
        if rule is Rule.LEADING and not (yield from shows_tools()):
            rules.add(Rule.TOOLS)
    return frozenset(rules)


# Roles in order, each with 1 where its text is asked about; the message before it is the other one whose text changes.
_Order: TypeAlias = tuple[tuple[str, int], ...]
_ORDERS: tuple[tuple[Rule, tuple[_Order, ...]], ...] = (
    (
        Rule.DEVELOPER,
        (
            (("developer", 1), ("user", 0)),
            (("system", 0), ("developer", 1), ("user", 0)),
            (("user", 0), ("developer", 1), ("user", 0)),
        ),
    ),
    (Rule.SYSTEM, ((("system", 1), ("user", 0)),)),
    (Rule.LEADING, ((("system", 0), ("system", 1), ("user", 0)),)),
    (
        Rule.LATE,
        (
            (("user", 0), ("system", 1)),
            (("system", 0), ("user", 0), ("system", 1), ("user", 0)),
            (("user", 0), ("assistant", 0), ("system", 1), ("user", 0)),
        ),
    ),
    (Rule.NO_USER, ((("system", 1),),)),
    (Rule.USERS, ((("user", 0), ("user", 1)),)),
    (Rule.REPLIES, ((("user", 0), ("assistant", 0), ("assistant", 1), ("user", 0)),)),
    (Rule.AFTER_TOOL, ((("user", 0), ("call", 0), ("tool", 0), ("user", 1)),)),
)
_WORDS = ("red", "blue")
_CALL_ID = "call12345"  # Mistral's templates take nine letters and digits
_TOOL = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}


def _takes(order: _Order, rules: Collection[Rule]) -> Generator[Probe, Rendered, bool]:
    at = next(position for position, (_, asked) in enumerate(order) if asked)
    texts = [f"{role} {position}" for position, (role, _) in enumerate(order)]
    renderings: list[Sequence[object]] = []
    for own, before in ((0, 0), (1, 0), *(((0, 1),) if at and order[at - 1][0] != "call" else ())):
        texts[at] = f"{_WORDS[own]} {at}"
        if at:
            texts[at - 1] = f"{_WORDS[before]} {at - 1}"
        messages = [_probe_message(role, text) for (role, _), text in zip(order, texts, strict=True)]
        tools = [{"type": "function", "function": _TOOL}] if any(role == "call" for role, _ in order) else None
        rendered = yield Probe(list(as_sent(messages, rules)), tools)
        if rendered is None:
            return False
        renderings.append(rendered)
    first = _difference(renderings[0], renderings[1])
    if first is None:
        return False
    if len(renderings) < 3:
        return True
    earlier = _difference(renderings[0], renderings[2])
    return earlier is not None and earlier < first


def shows_tools() -> Generator[Probe, Rendered, bool]:
    """True if tools, or the calls of the history, change the prompt."""
    asked = [_probe_message("user", "red 0")]
    without = yield Probe(asked)
    with_tools = yield Probe(asked, [{"type": "function", "function": _TOOL}])
    if with_tools is not None and without is not None and _difference(without, with_tools) is not None:
        return True
    called = []
    for name in _WORDS:
        call = _probe_message("call", "", name)
        called.append((yield Probe([*asked, call, _probe_message("tool", "red 2")])))
    one, other = called
    return one is not None and other is not None and _difference(one, other) is not None


def _probe_message(role: str, text: str, name: str = str(_TOOL["name"])) -> ChatMessage:
    if role == "tool":
        return {"role": "tool", "tool_call_id": _CALL_ID, "content": text}
    if role == "call":
        call = {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": "{}"}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"role": role, "content": text}


def _difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first place at which they differ."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def _changes(messages: Sequence[ChatMessage], rules: Collection[str]) -> bool:
    """True if a rule applies; most conversations need none, and are not copied."""
    before, leading, user = "", True, False
    for message in messages:
        role = str(message.get("role"))
        if role in ("system", "developer"):
            if (role == "developer" and Rule.DEVELOPER in rules) or Rule.SYSTEM in rules:
                return True
            if (leading and before and Rule.LEADING in rules) or (not leading and Rule.LATE in rules):
                return True
        else:
            leading = False
        user = user or role not in ("system", "developer")
        if Rule.TOOLS in rules and (role == "tool" or message.get("tool_calls")):
            return True
        if (rule := _PAIRS.get((before, role))) is not None and rule in rules:
            return True
        before = role
    return not user and Rule.NO_USER in rules


def _without_tools(message: ChatMessage) -> ChatMessage:
    """A call or a result as text, for a template that knows neither."""
    if message.get("role") == "tool":
        return _as_user_text(message, "tool_result")
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    said = [
        f"<tool_call>\n{function.get('name')} {function.get('arguments')}\n</tool_call>"
        for function in functions
        if isinstance(function, dict)
    ]
    text = {"role": "assistant", "content": "\n".join(said)}
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return _joined(others, text)


def _as_user_text(message: ChatMessage, mark: str) -> ChatMessage:
    """The message as a user's message, between marks that name its role."""
    content = message.get("content")
    begin, end = f"<{mark}>\n", f"\n</{mark}>"
    if isinstance(content, list):
        marked: Any = [{"type": "text", "text": begin}, *content, {"type": "text", "text": end}]
    else:
        marked = f"{begin}{'' if content is None else content}{end}"
    return {"role": "user", "content": marked}


def _joined(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    joined = first | {"content": _both(first.get("content"), second.get("content"))}
    for name in ("reasoning_content", "reasoning"):
        if first.get(name) and second.get(name):
            joined[name] = f"{first[name]}{BETWEEN}{second[name]}"
        elif second.get(name):
            joined[name] = second[name]
    lists = [message["tool_calls"] for message in (first, second) if isinstance(message.get("tool_calls"), list)]
    calls = [call for each in lists for call in each]
    return joined | ({"tool_calls": calls} if calls else {})


def _both(first: Any, second: Any) -> Any:
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{BETWEEN}{second}"
    return [*_parts(first), {"type": "text", "text": BETWEEN}, *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
