"""How often a step was tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often a step's computation began, and how the attempts before the running one ended.

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
        """Attempts of whose end nothing was heard: the trainer was killed, its machine lost power, or it has a bug."""
        return max(0, self.begun - 1 - self.failed - self.interrupted)
