"""Origin of a policy's first version, if the policy began from a version of another policy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VersionOrigin:
    """The version of another policy that a policy begins from: the two have the same files."""

    policy: str
    n: int
