"""Progress of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed at which a step is computed.

    Args:
        tokens_a_second: read, or trained, in the present stage.
        seconds_left: until the step is computed, estimated from the part that is done.
    """

    tokens_a_second: float
    seconds_left: float


class StatusCallback(Protocol):
    """Called often with a step's current activity, and with its pace while something is computed."""

    def __call__(self, status: str, pace: Pace | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Current activity of a step, or of the version it made, for people.

    Args:
        now: e.g. `training, micro-batch 3 of 8`; as of a few seconds ago.
        seconds: since the attempt at the step began; None: none has, or it has ended.
        tokens_a_second, seconds_left: as of a `Pace`; None until the first micro-batch is computed, and where nothing
            is computed.
    """

    now: str
    seconds: float | None = None
    tokens_a_second: float | None = None
    seconds_left: float | None = None


def waiting_words(why: str | None) -> str:
    """Activity of a step between two attempts, for people.

    Args:
        why: reason that the last attempt ended before the step was done.
    """
    return "waits to be tried again" if why is None else f"waits to be tried again: {why}"
