"""The chart of verdicts and lengths over time: moving means over replies, and where a version began to answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pydantic import JsonValue

from clawloop.contracts.browsing import ReplyFigures

# Replies in a mean: few enough to show what a step of 16 samples changed.
WINDOW = 20


def chart_of(replies: Sequence[ReplyFigures]) -> dict[str, JsonValue]:
    """Columns for the chart, one entry a reply, oldest first.

    Returns:
        `at`: seconds since 1970; `praise`: mean verdict of the newest judged replies, null before the first;
        `length`: mean tokens of the newest replies; `versions`: `[position, number]` where another version begins.
    """
    verdicts: deque[int] = deque(maxlen=WINDOW)
    lengths: deque[int] = deque(maxlen=WINDOW)
    at: list[JsonValue] = []
    praise: list[JsonValue] = []
    length: list[JsonValue] = []
    versions: list[JsonValue] = []
    shown: int | None = None
    for position, reply in enumerate(replies):
        if reply.verdict is not None:
            verdicts.append(reply.verdict)
        lengths.append(reply.tokens)
        at.append(reply.at.timestamp())
        praise.append(round(sum(verdicts) / len(verdicts), 3) if verdicts else None)
        length.append(round(sum(lengths) / len(lengths), 1))
        # Side by side for a moment while a version is published: only a later one marks a beginning, or a roll-back.
        if reply.version != shown and _stays(replies, position):
            versions.append([position, reply.version])
            shown = reply.version
    return {"at": at, "praise": praise, "length": length, "versions": versions}


def _stays(replies: Sequence[ReplyFigures], position: int) -> bool:
    """Whether the version of this reply also gave the next one, or there is none yet."""
    following = replies[position + 1 : position + 2]
    return all(reply.version == replies[position].version for reply in following)
