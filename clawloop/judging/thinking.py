"""A model's thinking, taken out of its text.

Knows only the tags `<think>` and `</think>`; engines with a reasoning parser have taken it out already.
"""

from __future__ import annotations

_OPEN, _CLOSE = "<think>", "</think>"


def without_thinking(text: str) -> str:
    """`text` after the thinking it begins with; empty if that never ended.

    A text may also begin inside its thinking, because some templates put the opening tag into the prompt.
    Tags further on are text that speaks about tags, and stay.
    """
    if text.lstrip().startswith(_OPEN):
        return text.partition(_CLOSE)[2]
    before, close, after = text.partition(_CLOSE)
    return after if close and _OPEN not in before else text
