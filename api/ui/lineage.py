"""A policy's versions as lines of a table: where each stands in the tree, and what its replies were like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.core.contracts.answers import ReplyFigures
from clawloop.core.contracts.training import VersionView
from clawloop.core.gate.checks import NUMBERS


@dataclass(frozen=True, slots=True)
class Line:
    """
    Args:
        depth: how far to the right it stands: 0 on the path of the newest version, more on each branch beside it.
        good, bad: numbers of such verdicts on its replies.
        tokens: of a reply, on average; None without replies.
        distance: to the base model, in nats a token, as the gate measured it; None: not measured.
    """

    version: VersionView
    depth: int
    good: int
    bad: int
    tokens: float | None
    distance: float | None


def lines_of(versions: Sequence[VersionView], replies: Sequence[ReplyFigures]) -> list[Line]:
    """The versions from the newest to the base, each branch right of the one that it leaves.

    Args:
        replies: by which they are described; of one that is there twice the second does not count.
    """
    depths = _depths(versions)
    by_version: dict[int, list[ReplyFigures]] = {}
    for reply in dict.fromkeys(replies):
        by_version.setdefault(reply.version, []).append(reply)
    return [_line(version, depths[version.n], by_version.get(version.n, [])) for version in reversed(versions)]


def is_on_the_path(version: VersionView) -> bool:
    return any(word in version.state for word in ("head", "active", "on the path", "pinned"))


def _line(version: VersionView, depth: int, replies: Sequence[ReplyFigures]) -> Line:
    verdicts = [reply.verdict for reply in replies]
    measured = [check.figures.get("base_distance") for check in version.gate if check.name == NUMBERS]
    return Line(
        version,
        depth,
        verdicts.count(1),
        verdicts.count(-1),
        sum(reply.tokens for reply in replies) / len(replies) if replies else None,
        measured[0] if measured else None,
    )


def _depths(versions: Sequence[VersionView]) -> dict[int, int]:
    depths: dict[int, int] = {}
    taken: set[int] = set()  # versions whose main line is drawn: a further child begins a branch
    by_number = {version.n: version for version in versions}
    heads = sorted(versions, key=lambda version: (not is_on_the_path(version), -version.n))
    for head in heads:
        path: list[int] = []
        at: VersionView | None = head
        while at is not None and at.n not in depths and at.n not in path:
            path.append(at.n)
            at = None if at.parent is None else by_number.get(at.parent)
        if not path:
            continue
        joined = None if at is None else at.n
        depth = 0 if joined is None else depths[joined] + (1 if joined in taken else 0)
        for number in path:
            depths[number] = depth
            taken.add(number)
    return depths
