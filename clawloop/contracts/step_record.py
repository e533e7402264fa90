"""The stored record of a step, for programs that compare runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The stored record of a step that made a version.

    Args:
        metrics: as in `VersionView`.
        at: when the version was made.
    """

    policy: str
    n: int
    metrics: Mapping[str, JsonValue]
    at: datetime
