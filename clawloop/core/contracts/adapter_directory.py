"""A version's directory on disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """A version's directory on disk; only the database knows whether its step was committed.

    Args:
        path: as in `clawloop.core.contracts.training.VersionRef`.
    """

    policy: str
    n: int
    path: str
