"""Contracts of the gate: what each of its checks found about a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

SECONDS = "seconds"
"""The figure of a check that gives its duration in seconds."""


class CheckName(StrEnum):
    """A check of the gate."""

    NUMBERS = "numbers"  # the step's figures, and how far the version moved
    REPLAY = "replay"  # held-out turns, scored under the version and its parent
    PROBES = "probes"  # prompts that the version and its parent answered
    CANARY = "canary"  # verdicts on a share of the sessions, once the version is the head


class CheckResult(StrEnum):
    """Result of a check of the gate."""

    PASSED = "passed"
    NOT_ENOUGH = "not_enough"  # too little to decide by; the version is not rejected for it
    FAILED = "failed"  # the version is rejected


@dataclass(frozen=True, slots=True)
class GateCheck:
    """Result of one check of the gate for a version, with reason and figures.

    Args:
        reason: for people: what was compared, or what is wrong.
        figures: the numbers it was decided by; None where a number is not known.
    """

    name: CheckName
    result: CheckResult
    reason: str
    figures: Mapping[str, float | None]

    def noting(self, note: str) -> GateCheck:
        """The check with a further remark for people."""
        return replace(self, reason=f"{self.reason}; {note}")

    def timed(self, seconds: float | None) -> GateCheck:
        """The check with its duration among its figures; None: unknown."""
        return self if seconds is None else replace(self, figures={**self.figures, SECONDS: seconds})


def gate_seconds(checks: Sequence[GateCheck]) -> float | None:
    """Seconds that the checks of a version took, without the waiting between them; None if unknown."""
    known = [seconds for check in checks if (seconds := check.figures.get(SECONDS)) is not None]
    return sum(known) if known else None
