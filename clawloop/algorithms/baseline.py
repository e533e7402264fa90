"""A running mean of verdicts, subtracted from the reward when a recipe says `baseline = "mean"`.

Knows nothing about where it is kept: it is two numbers that the caller stores.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunningMean:
    """The verdicts of a policy so far.

    Args:
        count: how many.
        total: their sum.
    """

    count: int = 0
    total: float = 0.0

    def including(self, verdict: float) -> RunningMean:
        return RunningMean(self.count + 1, self.total + verdict)

    def relative(self, verdict: float) -> float:
        """The verdict minus the mean of those before it; the first stands as it is.

        Asked for verdicts of ±1 only: 0 is no opinion, and the mean would turn it into one.
        """
        return verdict - self.total / self.count if self.count else verdict
