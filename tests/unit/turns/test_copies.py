"""Copies of a conversation are found in side turns, and other conversations' are not taken for them."""

from __future__ import annotations

import pytest

from clawloop.core.contracts.turns import Message
from clawloop.core.turns.copies import find_copies
from tests.chats import assistant, system, user
from tests.openclaw_chats import AGENT_PROMPT, COMPACTION, DEMO_LINE, MEMORY_FLUSH, RECAP

ASKED = "Where did I leave the keys of the summer house?"
SAID = "In the blue bowl on the shelf beside the door."
OWN: list[Message] = [
    AGENT_PROMPT,
    user(f"[Mon 2026-11-23 12:55 UTC] {ASKED}\n\n{DEMO_LINE}"),
    assistant(SAID),
    user("[Mon 2026-11-23 12:56 UTC] Thank you."),
]


def summary(of: str, reply: str = "## Goal\nnone") -> list[Message]:
    return [
        system(COMPACTION),
        {"role": "user", "content": [{"type": "text", "text": f"<conversation>\n{of}\n</conversation>\n\nSummarize."}]},
        assistant(reply),
    ]


@pytest.mark.parametrize(
    "copy",
    [
        [AGENT_PROMPT, user(f"[Mon 2026-11-23 12:55 UTC] {ASKED}\n\nRuntime: x"), assistant(SAID), user(MEMORY_FLUSH)],
        summary(f"[User]: {ASKED}"),
        summary(f"[Assistant]:\n  {SAID[:30]}\n {SAID[30:]}"),
        [system(RECAP), user('{"messages":["user: Hello\\n' + ASKED + '"]}')],
    ],
    ids=["memory flush", "summary", "in other lines", "recap"],
)
def test_a_quoted_line_makes_a_copy(copy: list[Message]) -> None:
    assert find_copies(OWN, {"copy": copy}) == ["copy"]


def test_what_quotes_a_summary_of_a_copy_is_one_too() -> None:
    said = "The user looks for keys, which lie in a blue bowl."
    first = summary(f"[User]: {ASKED}", f"## Goal\n{said}")
    second = summary(f"[Tool result]: 7\n<previous-summary>\n{said}\n</previous-summary>")
    assert find_copies(OWN, {"second": second, "first": first}) == ["first", "second"]


@pytest.mark.parametrize(
    "other",
    [
        summary("[User]: Which is longer, the Rhine or the Elbe?"),
        summary("[User]: Thank you."),
        [AGENT_PROMPT, user(f"Other words than those.\n\n{DEMO_LINE}"), user(MEMORY_FLUSH)],
    ],
    ids=["other words", "what everybody says", "what a client adds"],
)
def test_what_several_conversations_have_makes_no_copy(other: list[Message]) -> None:
    assert find_copies(OWN, {"other": other}) == []


def test_long_lines_are_known_by_their_beginning() -> None:
    line = "All of this has to be kept in mind. " * 50
    cut = summary(f"[User]: {line[:200]} [... truncated ...]")
    assert find_copies([user(line)], {"cut": cut}) == ["cut"]
