"""Chooses a turn's hint, and inserts it into the prompt.

A hint is trivial if it only repeats the verdict, the request or the reply: the teacher learns nothing from it. A
repeated verdict is recognised in English; in another language such a hint passes, and has little effect.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.core.contracts.turns import Message
from clawloop.core.judging.evidence import Evidence, has_control_tokens
from clawloop.core.judging.voting import HintVote
from clawloop.core.turns.canonical import is_volatile

SHORTEST = 10  # characters; a hint must be longer: a shorter one says "redo" rather than how
LEAD_IN = "\n\nKeep in mind: "

# Scripts without spaces between words: each character counts as a word.
_UNSPACED = re.compile("([぀-ヿ㐀-䶿一-鿿가-힣豈-﫿฀-๿])")
_VERDICT_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
    a about again all an and answer assistant at bad be better but by complained correct corrected did
    didn do does doesn done error failed feedback fine good great happy has have hint i improve
    improved in incorrect is isn it its like liked made make mistake more much needs next not of ok
    okay perfect poor previous quality redo reply response right satisfied should so t thanked
    thanks that the this time to try unhappy unsatisfied user very wanted was wasn well were what
    with wrong you your
    """,
    )
)


@dataclass(frozen=True, slots=True)
class HintChoice:
    """The hint of a turn, or why there is none.

    Args:
        text: None if there is no hint.
        answered: at least as many answers could be parsed as a hint needs. Without `text`, True means that there is no
            hint, and False that it is not known whether there is one.
        why: for people.
    """

    text: str | None
    answered: bool
    why: str


NOT_ASKED = HintChoice(None, answered=False, why="no hint asked for")


def choose_hint(
    votes: Sequence[HintVote | None], evidence: Evidence, needed: int = 1, *, from_tools: bool = False
) -> HintChoice:
    """The longest accepted hint of more than ten characters that is not trivial; the first of equals.

    Args:
        votes: None for an answer that cannot be read.
        needed: how many answers must have a usable hint.
        from_tools: the answers may rest on tool output, and not on the user's words alone.
    """
    request = "" if evidence.task is None else evidence.task.text
    reply = "\n".join(statement.text for statement in evidence.reply)
    readable = [vote for vote in votes if vote is not None]
    if not readable:
        return HintChoice(None, answered=False, why="no valid hint answer")
    answered = len(readable) >= needed
    offered = [vote.text for vote in readable if vote.text is not None]
    if not offered:
        return HintChoice(None, answered, why="the judge found no hint")
    faults = [fault_of(text, request=request, reply=reply) for text in offered]
    usable = [text for text, fault in zip(offered, faults, strict=True) if fault is None]
    if not usable:
        return HintChoice(None, answered, why=f"hint dropped: {faults[0]}")
    why = (
        f"{len(usable)} of {len(readable)} hint answers usable{', which may rest on tool output' if from_tools else ''}"
    )
    if len(usable) < needed:
        return HintChoice(None, answered, why=f"{why}, {needed} needed")
    return HintChoice(max(usable, key=len), answered=True, why=why)


def reject_hint(choice: HintChoice, why: str) -> HintChoice:
    """No hint, because it cannot be used, e.g. `template mismatch`."""
    return HintChoice(None, answered=choice.answered, why=why)


def fault_of(hint: str, *, request: str, reply: str) -> str | None:
    """The reason that a hint cannot be used; None if it can."""
    if len(hint.strip()) <= SHORTEST:
        return "too short"
    if has_control_tokens(hint):
        return "holds control tokens"
    words = _words(hint)
    if set(words) <= _VERDICT_WORDS:
        return "repeats the verdict"
    if _within(words, _words(request)):
        return "repeats the request"
    if _within(words, _words(reply)):
        return "repeats the reply"
    return None


def with_hint(messages: Sequence[Message], hint: str) -> list[Message] | None:
    """A copy of the messages with the hint at the end of the last user message that is not volatile.

    None if there is no such message, or its content is neither text nor a list of parts.
    """
    for at in reversed(range(len(messages))):
        message = messages[at]
        if message.get("role") != "user" or is_volatile(message):
            continue
        content = message.get("content")
        if isinstance(content, str):
            hinted = message | {"content": f"{content}{LEAD_IN}{hint}"}
        elif isinstance(content, list):
            hinted = message | {"content": [*content, {"type": "text", "text": f"{LEAD_IN}{hint}"}]}
        else:
            return None
        return [*messages[:at], hinted, *messages[at + 1 :]]
    return None


def _words(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", text).casefold()
    return re.findall(r"[^\W_]+", _UNSPACED.sub(r" \1 ", folded))


def _within(words: Sequence[str], text: Sequence[str]) -> bool:
    return f" {' '.join(words)} " in f" {' '.join(text)} "
