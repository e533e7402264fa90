"""Staleness of a sample: the limit after which it is not trained.

Next-state evidence ages with each version. Explicit feedback does not; it is dropped only if the policy has drifted
away from the response itself.
"""

from __future__ import annotations

from collections.abc import Mapping


def versions_apart(version: int, head: int, parents: Mapping[int, int]) -> int:
    """Number of steps between two versions in the version tree, through their nearest common ancestor.

    The difference of their numbers would be wrong after a roll-back, when the head does not descend from `version`.

    Args:
        version: the version that answered.
        head: the version that would be trained.
        parents: version → parent, for every version but 0.

    Raises:
        KeyError: the parent of a version is not in `parents`.
    """
    up = path_to_base(version, parents)
    down = path_to_base(head, parents)
    # Both paths end at version 0, so the versions in common are their common end.
    shared = len(set(up) & set(down))
    return len(up) + len(down) - 2 * shared


def path_to_base(version: int, parents: Mapping[int, int]) -> list[int]:
    """The version, its parent, and so on to version 0."""
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
