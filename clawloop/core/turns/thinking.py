"""Removes a model's thinking from its text.

Two rules: judging removes the thinking a text begins with; comparing messages removes every block of it, because
clients drop thinking from the history in different ways. Engines with a reasoning parser have removed it already.
"""

from __future__ import annotations

import re

THINKING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})  # types of content parts

_OPEN, _CLOSE = "<think>", "</think>"
_TAG = re.compile(r"(</?think>)")


def without_leading_thinking(text: str) -> str:
    """`text` after the thinking it begins with; empty if the thinking has no end.

    A text may also begin inside its thinking, because some templates put the opening tag into the prompt. Later tags
    are text about tags, and stay.
    """
    if text.lstrip().startswith(_OPEN):
        return text.partition(_CLOSE)[2]
    before, close, after = text.partition(_CLOSE)
    return after if close and _OPEN not in before else text


def without_any_thinking(text: str) -> str:
    """The text without `<think>…</think>` and without the white space around it; idempotent.

    A leading `…</think>` whose opening tag was in the prompt is removed too, and so is thinking that was cut off. Where
    removing blocks leaves or makes a tag, the whole text is kept: otherwise a second pass would change it again.
    """
    if "think>" not in text:
        return text.strip()
    pieces: list[str] = []
    is_thinking = False
    for piece in _TAG.split(text):
        if piece == _OPEN:
            is_thinking = True
        elif piece == _CLOSE:
            if not is_thinking:
                pieces.clear()
            is_thinking = False
        elif not is_thinking:
            pieces.append(piece)
    rest = "".join(pieces)
    return (text if _TAG.search(rest) else rest).strip()
