"""Progress reports of a step, for heartbeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A micro-batch is finished.

    Args:
        stage: `policy`, `reference` or `teacher`, several joined by `and` if one pass has these roles; `answered`, the
            version that answered; `train`; or `check`, under the weights as they are.
        done, of: micro-batches of this rank in this stage.
    """

    stage: str
    done: int
    of: int

    def __str__(self) -> str:
        what = "training" if self.stage == "train" else f"scoring ({self.stage})"
        return f"{what}, micro-batch {self.done} of {self.of}"


ProgressCallback = Callable[[Progress], None]
StatusCallback = Callable[[str], None]


def ignore_progress(progress: Progress) -> None:
    del progress


def ignore_status(status: str) -> None:
    del status
