"""A conversation as the engine gets it: the client's messages, with lessons as the last part of the system message.

Clients, sessions and next states know the client's own messages alone; whatever renders a turn's prompt anew does it by
`turn_as_sent`.
"""

from __future__ import annotations

from collections.abc import Sequence

from clawloop.core.contracts.turns import Message, TurnRecord
from clawloop.core.families.orders import BETWEEN, SENT_BY, as_sent

# Among a turn's sampling settings: the template's own system text, which stood before the lessons of a conversation
# without a system message.
DEFAULT_SYSTEM = "default_system"

LEAD_IN = (
    "Notes on what this user has asked for before. Keep to them, unless an instruction above or the conversation says"
    " otherwise:"
)
_SYSTEM = ("system", "developer")


def has_system(messages: Sequence[Message]) -> bool:
    """True if the messages begin with a system message."""
    return bool(messages) and messages[0].get("role") in _SYSTEM


def with_lessons(messages: Sequence[Message], lessons: Sequence[str], default_system: str = "") -> Sequence[Message]:
    """The messages with lessons at the end of the last of the system messages that they begin with.

    Args:
        messages: as the client sent them; they are not changed.
        lessons: in their order; none: the same object is returned.
        default_system: what the template says where a conversation has no system message, and would no longer say.
    """
    if not lessons:
        return messages
    block = "\n".join((LEAD_IN, *(f"- {lesson}" for lesson in lessons)))
    leading = 0
    while leading < len(messages) and messages[leading].get("role") in _SYSTEM:
        leading += 1
    if not leading:
        text = f"{default_system}{BETWEEN}{block}" if default_system else block
        return [{"role": "system", "content": text}, *messages]
    last = messages[leading - 1]
    content = last.get("content")
    if isinstance(content, list):
        joined: Message = last | {"content": [*content, {"type": "text", "text": f"{BETWEEN}{block}"}]}
    else:
        joined = last | {"content": f"{content}{BETWEEN}{block}" if content else block}
    return [*messages[: leading - 1], joined, *messages[leading:]]


def turn_as_sent(turn: TurnRecord, messages: Sequence[Message]) -> Sequence[Message]:
    """These messages as the turn's engine would have got them in place of its own: with the turn's lessons, in the
    order that the template takes."""
    default_system, rules = turn.sampling.get(DEFAULT_SYSTEM), turn.sampling.get(SENT_BY)
    taught = with_lessons(
        messages,
        [lesson.text for lesson in turn.lessons],
        default_system if isinstance(default_system, str) else "",
    )
    return as_sent(taught, [str(rule) for rule in rules] if isinstance(rules, list) else ())
