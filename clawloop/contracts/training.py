"""What learning speaks of beyond one turn: steps, the batches they take, the versions they make.

Knows nothing about torch, stores or Temporal. A step of number n makes version n; numbers are never used again,
so a step that was given up leaves a gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from pydantic import JsonValue

from clawloop.ids import SampleId
from clawloop.recipes.recipe import Recipe


class SampleState(StrEnum):
    """What became of a sample."""

    FRESH = "fresh"  # waits for a step
    CLAIMED = "claimed"  # in a step that is being computed
    TRAINED = "trained"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"
    SUPERSEDED = "superseded"  # feedback changed the judgement before a step took it


class StepState(StrEnum):
    """How far a step is."""

    CLAIMED = "claimed"  # it has a batch and is being computed, or will be again
    COMMITTED = "committed"  # its version is the policy's head, or was
    ABANDONED = "abandoned"  # the policy moved on without it; its samples are free again
    QUARANTINED = "quarantined"  # its numbers were bad; its samples are not taken again unless asked for


class TrainingState(StrEnum):
    TRAINING = "training"
    WAITING = "waiting"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class VersionRef:
    """A version's files.

    Args:
        path: the directory, below the data folder's `adapters`, e.g. `default/v3-0123456789ab`.
        sha256: of the adapter, hexadecimal; what `adapter.check_version` takes.
    """

    policy: str
    n: int
    parent: int
    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class AdapterDirectory:
    """What an attempt at a step left on disk, by its name; whether a version has it, the ledger knows.

    Args:
        path: as in `VersionRef`.
    """

    policy: str
    n: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSample:
    """One judged response with all that its turn recorded; every length agrees.

    Args:
        logprobs: recorded when sampling, one for each response token.
        temperature: recorded when sampling.
        version: the version that answered.
        reward: None if the verdict says nothing.
        hinted_prompt_ids: None if there is no hint.
        explicit: it comes from explicit feedback, so it does not age.
    """

    sample_id: SampleId
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    temperature: float
    version: int
    reward: float | None
    hinted_prompt_ids: Sequence[int] | None = None
    explicit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """All that a step depends on.

    Args:
        base_model: the policy's base, by the name under which engines serve it.
        parent: the version it starts from; None is version 0.
        epoch: the policy's when the batch was claimed.
        samples: in the order in which they were claimed.
        teachers: earlier versions that answered samples with a hint, by number; neither 0 nor the parent.
        without_hint: samples whose hint nobody can read any more, and why.
    """

    policy: str
    base_model: str
    n: int
    parent: VersionRef | None
    epoch: int
    recipe: Recipe
    samples: Sequence[BatchSample]
    teachers: Mapping[int, VersionRef] = field(default_factory=dict)
    without_hint: Mapping[SampleId, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What a step measured; see `clawloop.training.step.StepReport`.

    Args:
        dropped: samples left out, and why.
        without_hint: samples of which only the verdict was trained, and why.
        seconds: from the batch's arrival to the adapter's last byte.
    """

    loss: float
    parts: Mapping[str, float]
    grad_norm: float
    ratio: float
    kl: float | None
    tokens: int
    samples: int
    dropped: Mapping[SampleId, str]
    without_hint: Mapping[SampleId, str] = field(default_factory=dict)
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step's adapter, on disk and not yet committed."""

    version: VersionRef
    figures: StepFigures


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of claiming a batch, also as the training workflow's saved histories hold it.

    Args:
        state: None: there is no batch; `reason` says what the step waits for.
        samples: how many the step has.
    """

    policy: str
    n: int
    state: StepState | None
    samples: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingView:
    """The status of a policy's training, for people and for the training workflow, whose saved histories hold it.

    Args:
        reason: what training waits for, or why it is paused.
        ready: number of fresh samples; needed: of a full batch; judging: of turns that wait for next state or judge.
        oldest_seconds: how long the oldest fresh sample has waited; None without one.
        max_wait_seconds: a smaller batch is taken once it has waited this long; None without a recipe.
        step: number of the claimed step, or of the next one.
        head: the newest committed version on the current path; version: the active one.
        pinned: the version that stays active whatever is trained; None if none.
        unpublished: the head should be active and is not yet.
    """

    policy: str
    pool: str
    state: TrainingState
    reason: str
    ready: int
    needed: int
    judging: int
    oldest_seconds: float | None
    step: int
    step_state: StepState | None
    head: int
    version: int
    epoch: int
    pinned: int | None
    unpublished: bool
    max_wait_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionView:
    """A version of a policy, for people.

    Args:
        parent: None for version 0.
        state: `active`, `head`, `on the path`, `rolled back`, `files removed`; several joined by commas.
        engines: ids of those that have loaded it; every engine has version 0.
        metrics: its `StepFigures`, with the number of samples dropped and trained without their hint; None for
            version 0.
    """

    n: int
    parent: int | None
    state: str
    active: bool
    pinned: bool
    engines: Sequence[str]
    metrics: Mapping[str, JsonValue] | None
    created_at: datetime
