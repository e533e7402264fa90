"""Small conversations and readers that the judging tests share."""

from __future__ import annotations

import re
from uuid import UUID

from clawloop.core.contracts.turns import Message
from clawloop.core.ids import TurnId
from clawloop.core.judging.evidence import Block, Evidence, gather
from clawloop.core.judging.prompts import JudgePrompt
from clawloop.core.turns.canonical import VOLATILE_FRAMES

TURN = TurnId(UUID("0190a5f0-1111-7222-8333-444455556666"))
INTERNAL = f"{VOLATILE_FRAMES[0][0]}\n"
"""How a volatile message of OpenClaw begins."""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "tool_call_id": "call1", "content": text}


def evidence(
    request: str = "Add two numbers in Python.",
    reply: str = "const add = (a, b) => a + b;",
    answer: str = "No, in Python.",
    feedback: str | None = None,
) -> Evidence:
    return gather([user(request)], assistant(reply), [user(answer)], feedback)


def question(prompt: JudgePrompt) -> str:
    content = prompt.messages[-1]["content"]
    assert isinstance(content, str)
    return content


def read_back(text: str, mark: str) -> list[tuple[str, str, str]]:
    """What a reader finds who knows only the mark: section, role and text of each block."""
    return re.findall(rf"<(\w+) {mark} (\w+)>\n(.*?)\n</\1 {mark}>", text, re.DOTALL)


def as_read(blocks: list[Block]) -> list[tuple[str, str, str]]:
    return [(block.section, block.role, block.text) for block in blocks]
