"""What training does now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a step is computed.

    Args:
        tokens_a_second: read, or trained, in the present stage.
        seconds_left: until the step is computed, as the part that is done lets expect.
    """

    tokens_a_second: float
    seconds_left: float


class StatusCallback(Protocol):
    """Gets what a step does now, with its pace where something is computed; called often."""

    def __call__(self, status: str, pace: Pace | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class StepProgress:
    """What is done now with a step or the version it made, for people.

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
    """What a step does between two attempts.

    Args:
        why: the attempt ended without an end of the step.
    """
    return "waits to be tried again" if why is None else f"waits to be tried again: {why}"
