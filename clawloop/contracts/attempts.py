"""Number of attempts at a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attempts:
    """Counts of a step's attempts, by the way they ended.

    Args:
        begun: the running one included.
        failed: the trainer said that it cannot compute this step.
        interrupted: something else ended it, and said so: the trainer was stopped, or PostgreSQL was away.
    """

    begun: int
    failed: int
    interrupted: int

    @property
    def lost(self) -> int:
        """Attempts that reported no end: the trainer was killed, its machine lost power, or it has a bug."""
        return max(0, self.begun - 1 - self.failed - self.interrupted)
