"""What training does now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What is done now with a step or the version it made, for people.

    Args:
        now: e.g. `training, micro-batch 3 of 8`; as of a few seconds ago.
        seconds: since the attempt at the step began; None: none has, or it has ended.
    """

    now: str
    seconds: float | None = None
