"""Whether a sample is too old for the version that would be trained on it.

Knows nothing about samples or the store. Next-state evidence ages with each version; explicit feedback does
not, and is dropped only if the policy has moved away from the response itself.
"""

from __future__ import annotations

from collections.abc import Mapping


def versions_apart(version: int, head: int, parents: Mapping[int, int]) -> int:
    """Steps between two versions of the tree, up to where they part and down again.

    After a roll-back the head is no descendant of what answered; numbers would hide how far they are apart.

    Args:
        version: the version that answered.
        head: the version that would be trained.
        parents: the parent of every version but 0.

    Raises:
        KeyError: a version of which no parent is known.
    """
    up = path_to_base(version, parents)
    down = path_to_base(head, parents)
    # Both paths end at version 0, so what they share is their common end.
    shared = len(set(up) & set(down))
    return len(up) + len(down) - 2 * shared


def path_to_base(version: int, parents: Mapping[int, int]) -> list[int]:
    """The version, its parent, and so on down to version 0."""
    path = [version]
    while path[-1] != 0:
        path.append(parents[path[-1]])
    return path


def is_stale(apart: int, *, bound: int, explicit: bool) -> bool:
    """True if the sample expires: more than `bound` versions apart, and not explicit feedback."""
    return not explicit and apart > bound


def has_drifted(mean_abs_log_ratio: float, *, bound: float, explicit: bool) -> bool:
    """True if a step drops a sample of explicit feedback as `drifted`: its mean |log ρ| exceeds the bound."""
    return explicit and mean_abs_log_ratio > bound
