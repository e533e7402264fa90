"""What the scripted engine answers OpenClaw, and what each of its requests is about.

Every message of a test holds a mark, `ask-CONVERSATION-N`; the answer repeats it, so that a mix-up shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fakes.replies import Reply

MARK = re.compile(r"\bask-([a-z0-9]+)-(\d+)\b")
TOOL = "with a TOOL"
"""In a message: the answer first runs a command."""
RUN = "run: "
"""In a message: the answer first runs the command that follows."""
SKILL = "by your SKILL"
"""In a message with a command: the skill is read before."""
MEMO = "for your MEMORY"
"""In a message: a memory flush writes `SAVED` where OpenClaw says."""
SAVED = "The user wants answers in one short sentence."
POLL = "[OpenClaw heartbeat poll]"
INTERNAL = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
# OpenClaw wants these of a summary.
_HEADINGS = ("Decisions", "Open TODOs", "Constraints/Rules", "Pending user asks", "Exact identifiers")


@dataclass(frozen=True, slots=True)
class About:
    """What a request is for.

    Args:
        what: `turn`, or which chore.
        conversation: None if no message has a mark.
        number: of the newest message with a mark.
        result: the last message is a tool's.
    """

    what: str
    conversation: str | None
    number: int | None
    result: bool


def about(messages: Sequence[Mapping[str, Any]]) -> About:
    said = [message for message in messages if not text_of(message).startswith(INTERNAL)]
    marks = [mark for message in said for mark in MARK.findall(text_of(message))]
    asked = [mark for message in said if message["role"] == "user" for mark in MARK.findall(text_of(message))]
    conversation = marks[-1][0] if marks else None
    number = max((int(n) for name, n in asked if name == conversation), default=None)
    return About(_what(said), conversation, number, said[-1]["role"] == "tool")


def _what(said: Sequence[Mapping[str, Any]]) -> str:
    opening = text_of(said[0])
    asked = next((text_of(message) for message in reversed(said) if message["role"] == "user"), "")
    if "context summarization assistant" in opening:
        return "compaction"
    if "Activity recap" in opening[:100]:
        return "recap"
    if "session title" in opening[:100]:
        return "title"
    if "Pre-compaction memory flush" in asked:
        return "memory flush"
    if "heartbeat monitor scratch context" in asked:
        return "heartbeat"
    # A message that interrupts a heartbeat has its poll before it.
    if POLL in asked and not MARK.search(asked.rpartition(POLL)[2]):
        return "heartbeat"
    return "turn"


def answer(body: dict[str, Any]) -> Reply:
    """The script."""
    messages = body["messages"]
    tokens = len(json.dumps(body["messages"]) + json.dumps(body.get("tools"))) // 4
    request = about(messages)
    mark = f"ask-{request.conversation}-{request.number}"
    match request.what:
        case "compaction":
            return Reply(_summary(messages), prompt_tokens=tokens)
        case "memory flush" if not request.result and (file := _memory_file(messages)) is not None:
            return Reply(calls=[("write", {"path": file, "content": SAVED})], prompt_tokens=tokens)
        case "memory flush" | "heartbeat":
            return Reply("NO_REPLY", prompt_tokens=tokens)
        case "recap" | "title":
            return Reply(f"About {mark}", prompt_tokens=tokens)
    rounds, said = _rounds(messages)
    steps: list[tuple[str, dict[str, Any]]] = []
    if SKILL in said:
        steps.append(("read", {"path": _skill_path(text_of(messages[0]))}))
    if RUN in said:
        steps.append(("exec", {"command": _command(said)}))
    elif TOOL in said:
        steps.append(("exec", {"command": f"echo result-of-{mark}"}))
    if rounds < len(steps):
        return Reply(calls=[steps[rounds]], prompt_tokens=tokens)
    return Reply(f"The answer to {mark}.", prompt_tokens=tokens)


def _rounds(messages: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """How many tools have answered since the newest message with a mark, and that message."""
    count = 0
    for message in reversed(messages):
        if message["role"] == "tool":
            count += 1
        elif message["role"] == "user" and MARK.search(text_of(message)):
            return count, text_of(message)
    return count, ""


def _memory_file(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Where the memory flush is to write; None where nothing was said for it."""
    said = [text_of(message) for message in messages if message["role"] == "user"]
    named = re.findall(r"\bmemory/\d{4}-\d\d-\d\d\.md\b", said[-1])
    return str(named[0]) if named and any(MEMO in text for text in said) else None


def _skill_path(system: str) -> str:
    """Where OpenClaw's own system prompt says that the skill lies."""
    [path] = re.findall(r"<location>([^<]*clawloop/SKILL\.md)</location>", system)
    return str(path)


def _command(said: str) -> str:
    return said.partition(RUN)[2].splitlines()[0].strip()


def _summary(messages: Sequence[Mapping[str, Any]]) -> str:
    """With what was said last in it, as answered: OpenClaw checks both."""
    marks = [f"ask-{name}-{n}" for message in messages for name, n in MARK.findall(text_of(message))]
    names = ", ".join(dict.fromkeys(marks))
    said = {
        "Decisions": f"- Answered: {names}, all of which has to be kept in mind.",
        "Exact identifiers": f"- {names}",
    }
    return "\n".join(f"## {heading}\n{said.get(heading, '- none')}" for heading in _HEADINGS)


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or () if isinstance(part, dict))
