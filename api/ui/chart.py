"""The chart over time: moving means of verdicts and lengths, the match of probes and of an evaluation, and where a
version began to answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from clawloop.contracts.browsing import ReplyFigures
from clawloop.contracts.gate_checks import CheckName
from clawloop.contracts.training import VersionView

# Replies in a mean: few enough to show what a step of 16 samples changed.
WINDOW = 20


def chart_of(
    replies: Sequence[ReplyFigures], probes: Mapping[int, float], matches: Mapping[int, float]
) -> dict[str, JsonValue]:
    """Columns for the chart, one entry a reply, oldest first.

    Args:
        probes: by version, the share of probes with checked content that it answered right.
        matches: by version, the share of an evaluation's requests that it answered as wanted.

    Returns:
        `at`: seconds since 1970; `praise`: mean verdict of the newest judged replies, null before the first;
        `length`: mean tokens of the newest replies; `probes`, `match`: of the version that answered, null where none
        was measured; `versions`: `[position, number]` where another version begins.
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
    measured: dict[str, JsonValue] = {
        name: [of_version.get(reply.version) for reply in replies]
        for name, of_version in (("probes", probes), ("match", matches))
    }
    return {"at": at, "praise": praise, "length": length, "versions": versions} | measured


def probes_of(versions: Sequence[VersionView]) -> dict[int, float]:
    """The share of the gate's probes answered right, by version; that of a parent is measured beside its version's."""
    found: dict[int, float] = {}
    for version in versions:
        for check in version.gate:
            if check.name is CheckName.PROBES:
                own, of_parent = check.figures.get("right"), check.figures.get("parent_right")
                if of_parent is not None and version.parent is not None:
                    found.setdefault(version.parent, of_parent)
                if own is not None:
                    found[version.n] = own
    return found


def _stays(replies: Sequence[ReplyFigures], position: int) -> bool:
    """True if the version of this reply also gave the next one, or if no next reply exists yet."""
    following = replies[position + 1 : position + 2]
    return all(reply.version == replies[position].version for reply in following)


def matches_of(versions: Sequence[VersionView]) -> dict[int, float]:
    """The match that an evaluation measured, by version."""
    return {version.n: version.match for version in versions if version.match is not None}
