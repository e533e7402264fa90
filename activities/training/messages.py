"""Messages between the training workflow and its activities: ids, numbers and reasons.

Durable: open workflows and saved histories hold these; later fields are optional.
"""

from __future__ import annotations

from uuid import UUID

from pydantic import BaseModel, ConfigDict

from clawloop.contracts.training import StepState
from clawloop.gate.probes import ProbeScores

REASON_LIMIT = 200  # characters of a reason that cross Temporal; PostgreSQL holds all of it
CHECKS_LIMIT = 400  # characters of what the gate's checks found that cross Temporal


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class ClaimBatch(_Message):
    """Ask for the batch of step `n`; the same batch each time."""

    policy: str
    n: int


class TrainStep(_Message):
    """Compute and commit the claimed step `n`; a step that is committed already is not trained again."""

    policy: str
    n: int


class StepDone(_Message):
    """The result of a step. Figures that are not known are None.

    Args:
        state: candidate: its version waits for the gate; committed: it was accepted before; abandoned: it ended
            without a version; quarantined: it cannot succeed, for `reason`, and the workflow calls `quarantine_step`;
            rejected: by the gate.
        parent: the version it started from.
        kl: None if the recipe measures none.
        reason: empty for a candidate and for a committed step.
        gate: what the checks of the gate found, in one line.
    """

    policy: str
    n: int
    state: StepState
    parent: int | None = None
    path: str | None = None
    sha256: str | None = None
    samples: int | None = None
    tokens: int | None = None
    loss: float | None = None
    kl: float | None = None
    ratio: float | None = None
    seconds: float | None = None
    reason: str = ""
    gate: str = ""


class QuarantineStep(_Message):
    """Quarantine the step's samples and pause training."""

    policy: str
    n: int
    reason: str


class ProbeVersion(_Message):
    """Ask the candidate that step `n` made, and its parent, the policy's probes."""

    policy: str
    n: int


class VersionProbed(_Message):
    """What the probes found.

    Args:
        asked: 0 if there was nothing to ask.
        failed: the version will be rejected for it.
        reason: figures, no text of a probe or an answer.
    """

    policy: str
    n: int
    asked: int = 0
    failed: bool = False
    reason: str = ""


class ProbeResult(_Message):
    """What one probe found: its scores, or why it has none; both where it has, but was not compared."""

    scores: ProbeScores | None = None
    problem: str = ""


class ProbeProgress(_Message):
    """The probes asked so far, by their ids, and how long that took: what the next attempt goes on from."""

    asked: dict[UUID, ProbeResult]
    seconds: float = 0.0


class DecideVersion(_Message):
    """Accept or reject the candidate that step `n` made; the same decision each time.

    Args:
        not_probed: why its probes could not be asked; empty if they were, or there are none.
    """

    policy: str
    n: int
    not_probed: str = ""


class VersionDecided(_Message):
    """The gate's decision.

    Args:
        state: committed, rejected, or abandoned because the policy moved on.
        reason: empty for a committed step.
        checks: what the checks found, with their figures, in one line.
    """

    policy: str
    n: int
    state: StepState
    reason: str = ""
    checks: str = ""


class AbandonStep(_Message):
    """Give up a claimed step; its samples are fresh again."""

    policy: str
    n: int
    reason: str
