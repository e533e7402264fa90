"""Progress reports of a step, for heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from clawloop.contracts.progress import Pace

# With gradient a token is read forward, once more where layers are recomputed, and backward, which costs two readings.
TRAINED_WORK = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """A micro-batch is finished.

    Args:
        stage: `policy`, `reference` or `teacher`, several joined by `and` if one pass has these roles; `answered`, the
            version that answered; `train`; or `check`, under the weights as they are.
        done, of: micro-batches of this rank in this stage.
        tokens: of this micro-batch.
        pace: of this rank; None if it is not measured.
    """

    stage: str
    done: int
    of: int
    tokens: int = 0
    pace: Pace | None = None

    def __str__(self) -> str:
        what = "training" if self.stage == "train" else f"scoring ({self.stage})"
        return f"{what}, micro-batch {self.done} of {self.of}"


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    del progress


def ignore_status(status: str, pace: Pace | None = None) -> None:
    del status, pace


class PaceMeter:
    """Passes reports of progress on with the pace of the step.

    Args:
        report: gets them.
        work: tokens of all micro-batches that will be reported, each that is trained counted `TRAINED_WORK` times.
        clock: seconds.
    """

    def __init__(self, report: ProgressCallback, work: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._work = work
        self._clock = clock
        self._done = 0
        self._began = self._last = self._stage_began = clock()
        self._stage_tokens = 0

    def __call__(self, progress: Progress) -> None:
        now = self._clock()
        if progress.done == 1:
            self._stage_began, self._stage_tokens = self._last, 0
        self._last = now
        self._stage_tokens += progress.tokens
        self._done += progress.tokens * (TRAINED_WORK if progress.stage == "train" else 1)
        in_stage = now - self._stage_began
        pace = None
        if in_stage > 0 and self._done:
            left = (now - self._began) / self._done * max(0, self._work - self._done)
            pace = Pace(self._stage_tokens / in_stage, left)
        self._report(replace(progress, pace=pace))
