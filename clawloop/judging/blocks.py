"""Blocks: pieces of evidence between tags that the evidence cannot contain.

Each tag carries a mark of six hexadecimal digits. The mark is derived from the turn id, again and again until no block
contains it, so no block can close itself, open another or give an answer that needs the mark. The mark is no secret:
who knows the turn id can compute the marks, but a mark that a text contains is not used.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from typing import Literal, TypeAlias

from clawloop.ids import TurnId

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
