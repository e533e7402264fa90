"""What the training workflow, its activities and its operators say to each other: ids, numbers and reasons.

Knows nothing about who does the work. Durable: open workflows and saved histories hold these; later fields are
optional.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from clawloop.contracts.training import StepState

REASON_LIMIT = 200  # characters of a reason that cross Temporal; Postgres holds the whole


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True)


class ClaimBatch(_Message):
    """Ask for the batch of step `n`; twice gives the same one."""

    policy: str
    n: int


class TrainStep(_Message):
    """Compute and commit the claimed step `n`; a step that is committed already is answered, not trained again."""

    policy: str
    n: int


class StepDone(_Message):
    """What became of a step.

    Args:
        state: committed; abandoned: the policy moved on without it; quarantined: it will never work, for `reason`,
            and whoever asked sets it aside with `quarantine_step`.
        parent: the version it started from; what is not known is None.
        kl: None if the recipe asks for none.
        reason: empty for a committed step.
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


class QuarantineStep(_Message):
    """Set the step's samples aside and pause training."""

    policy: str
    n: int
    reason: str


class AbandonStep(_Message):
    """Give a claimed step up; its samples are free again."""

    policy: str
    n: int
    reason: str


class PublishVersion(_Message):
    """Let the policy's newest version answer, whichever that is when it is done.

    While no engine has it the activity raises EngineUnavailable and is tried again, so that waiting for an engine
    leaves no trace in the workflow's history.
    """

    policy: str


class Published(_Message):
    """
    Args:
        head: the newest committed version on the current path.
        version: the one that answers now.
        engines: how many have it.
        missing: how many left rotation until they have it.
        reason: why the head does not answer, e.g. another one is pinned; empty if it does.
        waited_seconds: from when this was asked to when it answered.
    """

    policy: str
    head: int
    version: int
    engines: int = 0
    missing: int = 0
    reason: str = ""
    waited_seconds: float | None = None


# What operators say. The row in Postgres is written before and is the truth; these only wake the workflow.


class PauseTraining(_Message):
    reason: str = Field(min_length=1)


class ResumeTraining(_Message):
    """
    Args:
        retry: samples of quarantined steps may be taken again.
    """

    retry: bool = False


class RollBack(_Message):
    version: int = Field(ge=0)


class Pin(_Message):
    """
    Args:
        version: stays active whatever is trained; None: the newest one answers again.
    """

    version: int | None = Field(default=None, ge=0)


class SetRecipe(_Message):
    """
    Args:
        hash: of the recipe the policy learns by from the next step on.
    """

    name: str
    hash: str = Field(min_length=1)
