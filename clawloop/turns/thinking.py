"""What an assistant said aloud: its text without the thinking.

Knows nothing about messages; clients drop thinking from the history, each in its own way.
"""

from __future__ import annotations

import re

_TAG = re.compile(r"(</?think>)")


def spoken(text: str) -> str:
    """The text without `<think>…</think>` and without the white space around it.

    A leading `…</think>` whose opening stood in the prompt goes too, and so does thinking that was cut off before
    its end. Where taking blocks out leaves or makes a tag, the text is kept whole: so the result is the same when
    applied again, in one pass, whatever somebody wrote.
    """
    if "think>" not in text:
        return text.strip()
    kept: list[str] = []
    thinking = False
    for piece in _TAG.split(text):
        if piece == "<think>":
            thinking = True
        elif piece == "</think>":
            if not thinking:
                kept.clear()
            thinking = False
        elif not thinking:
            kept.append(piece)
    aloud = "".join(kept)
    return (text if _TAG.search(aloud) else aloud).strip()
