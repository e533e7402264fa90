"""Finds copies of a conversation's text in side turns: what a client quotes to summarise or remember it.

OpenClaw's summaries quote the conversation as text, and without its headers name no session; its memory flushes are
the conversation itself under a name of their own. Both end up in sessions of side turns alone.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from clawloop.core.contracts.turns import Message
from clawloop.core.turns.canonical import is_volatile, text_parts, without_time
from clawloop.core.turns.classify import is_side_prompt

Key = TypeVar("Key", bound=Hashable)

# Fewer characters are no sign of a copy: "Thank you very much." is said in many conversations.
_SHORTEST = 24
# Clients cut what they quote, and rarely before this.
_LONGEST = 100
# Of a long conversation its longest lines are enough to know it by.
_MOST_LINES = 500
# Lines by which no conversation is known: headings and frames of summaries, and OpenClaw's line about its own host.
_OF_CLIENTS = re.compile(r"[#<\[*]|Runtime: |The conversation history before this point was compacted")


def find_copies(own: Sequence[Message], beside: Mapping[Key, Sequence[Message]]) -> list[Key]:
    """Sessions that quote a line of the conversation, or of the summary in a session that does.

    Args:
        own: the conversation's messages and replies.
        beside: messages and replies of sessions of side turns alone.
    """
    left = {key: _one_text(messages) for key, messages in beside.items()}
    found: list[Key] = []
    lines = _longest(_lines(own))
    while lines:
        quoting = [key for key, text in left.items() if any(line in text for line in lines)]
        found += quoting
        for key in quoting:
            del left[key]
        replies = [message for key in quoting for message in beside[key] if message.get("role") == "assistant"]
        lines = _longest(_lines(replies))
    return found


def _lines(messages: Iterable[Message]) -> set[str]:
    found: set[str] = set()
    for message in messages:
        if message.get("role") in ("system", "developer") or is_volatile(message) or is_side_prompt(message):
            continue
        for text in text_parts(message):
            for line in text.splitlines():
                line = _collapsed(without_time(line))
                if len(line) >= _SHORTEST and not _OF_CLIENTS.match(line):
                    found.add(line[:_LONGEST])
    return found


def _longest(lines: set[str]) -> list[str]:
    return sorted(lines, key=lambda line: (-len(line), line))[:_MOST_LINES]


def _one_text(messages: Iterable[Message]) -> str:
    # A recap quotes as JSON: its line ends are two characters.
    said = "\n".join(text for message in messages for text in text_parts(message))
    return _collapsed(said.replace("\\n", "\n").replace('\\"', '"'))


def _collapsed(text: str) -> str:
    return " ".join(text.split())
