"""Contracts of training: steps, their batches, attempts and figures, the versions they make, and checks of the gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID

from pydantic import JsonValue

from clawloop.core.contracts.turns import Message
from clawloop.core.ids import EpisodeId, ProbeId, SampleId
from clawloop.core.recipes.recipe import Recipe

# Origins --------------------------------------------------------------------------------------------------------------
# Origin of a policy's first version, if the policy began from a version of another policy.


@dataclass(frozen=True, slots=True)
class VersionOrigin:
    """The version of another policy that a policy begins from: the two have the same files."""

    policy: str
    n: int


# Checks of the gate ---------------------------------------------------------------------------------------------------
# Contracts of the gate: what each of its checks found about a version.

SECONDS = "seconds"
"""The figure of a check that gives its duration in seconds."""


class CheckResult(StrEnum):
    """Result of a check of the gate."""

    PASSED = "passed"
    NOT_ENOUGH = "not_enough"  # too little to decide by; the version is not rejected for it
    FAILED = "failed"  # the version is rejected


@dataclass(frozen=True, slots=True)
class GateCheck:
    """Result of one check of the gate for a version, with reason and figures.

    Args:
        name: of its row in `clawloop/core/gate/gate.py`.
        reason: for people: what was compared, or what is wrong.
        figures: the numbers it was decided by; None where a number is not known.
    """

    name: str
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


# Attempts -------------------------------------------------------------------------------------------------------------
# Number of attempts at a step.


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


# Progress -------------------------------------------------------------------------------------------------------------
# Progress of training.


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed at which a step is computed.

    Args:
        tokens_a_second: read, or trained, in the present stage.
        seconds_left: until the step is computed, estimated from the part that is done.
    """

    tokens_a_second: float
    seconds_left: float


class StatusCallback(Protocol):
    """Called often with a step's current activity, and with its pace while something is computed."""

    def __call__(self, status: str, pace: Pace | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Current activity of a step, or of the version it made, for people.

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
    """Activity of a step between two attempts, for people.

    Args:
        why: reason that the last attempt ended before the step was done.
    """
    return "waits to be tried again" if why is None else f"waits to be tried again: {why}"


# Steps and versions ---------------------------------------------------------------------------------------------------
# Contracts of training: steps, their batches and figures, and the versions they make.
#
# Step n makes version n. Numbers are never reused, so an abandoned step leaves a gap.


class SampleState(StrEnum):
    """State of a sample."""

    FRESH = "fresh"  # waiting for a step
    CLAIMED = "claimed"  # in the batch of an open step
    TRAINED = "trained"
    EXPIRED = "expired"
    QUARANTINED = "quarantined"
    SUPERSEDED = "superseded"  # a later judgement replaced it before a step took it
    HELD_OUT = "held_out"  # never trained: versions are compared on it


UNTAKEN = (SampleState.FRESH, SampleState.HELD_OUT, SampleState.SUPERSEDED)
"""States of samples that no step has or had, and that a later judgement may change."""


class StepState(StrEnum):
    """State of a step."""

    CLAIMED = "claimed"  # it has a batch, and is being computed or will be retried
    CANDIDATE = "candidate"  # its version has files, and the gate has not decided yet
    COMMITTED = "committed"  # its version was accepted, and is the policy's head, or was
    ABANDONED = "abandoned"  # another version was committed, or it was given up; its samples are fresh again
    QUARANTINED = "quarantined"  # it made no version; its samples are taken again only by `training resume --retry`
    REJECTED = "rejected"  # the gate rejected its version; its samples as of a quarantined step


OPEN_STEPS = (StepState.CLAIMED, StepState.CANDIDATE)
"""A policy has one step in these states at most, and claims no batch meanwhile."""


class TrainingState(StrEnum):
    TRAINING = "training"
    WAITING = "waiting"
    PAUSED = "paused"


class OperatorAction(StrEnum):
    """An operator's change to a policy's training; Temporal histories contain the values."""

    PAUSE = "pause"
    RESUME = "resume"
    ROLL_BACK = "roll_back"
    PIN = "pin"
    SET_RECIPE = "set_recipe"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class OperatorChange:
    """A change that PostgreSQL holds, sent to the training workflow so that it reads the ledger at once.

    Args:
        detail: the reason, version or recipe, for the Temporal UI.
    """

    action: OperatorAction
    detail: str


@dataclass(frozen=True, slots=True)
class BroughtAdapter:
    """An adapter that was made elsewhere, written as version 1 of a policy that is to be made.

    Args:
        path: as in `VersionRef`.
        sha256: of its files, in hex.
        rank, alpha: of its LoRA.
    """

    path: str
    sha256: str
    rank: int
    alpha: float


@dataclass(frozen=True, slots=True)
class VersionRef:
    """A version's files.

    Args:
        path: the directory, below the data folder's `adapters`, e.g. `default/v3-0123456789ab`.
        sha256: of the adapter, in hex; see `clawloop.core.adapters.directory.check_version`.
    """

    policy: str
    n: int
    parent: int
    path: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSample:
    """One judged response with what its turn recorded.

    Args:
        prompt_ids, response_ids: token ids as the engine used them.
        logprobs: recorded when sampling, one per response token, in nats.
        temperature: recorded when sampling.
        version: the version that answered; 0 is the base model.
        reward: None without a verdict to learn from.
        hinted_prompts: the prompt with a hint in it, by the hint's place among the judgement's, the longest first.
        explicit: from explicit feedback: does not age, but is dropped if the policy has drifted from the response.
        response_mask: one per response token, True = trained; None: all are trained.
        episode: the episode whose turn it is; None for a chat.
        unit: of a held-out turn its session, or its rollout group: turns of one unit are alike.
    """

    sample_id: SampleId
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    temperature: float
    version: int
    reward: float | None
    hinted_prompts: Mapping[int, Sequence[int]] = field(default_factory=dict)
    explicit: bool = False
    response_mask: Sequence[bool] | None = None
    episode: EpisodeId | None = None
    unit: UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step's input.

    Args:
        base_model: the policy's base model, by the name under which engines serve it.
        parent: the version the step starts from; None is version 0.
        epoch: the policy's epoch when the batch was claimed: a counter that every roll-back increments.
        samples: in the order in which they were claimed.
        teachers: number → version, of earlier versions that answered samples with a hint and score them again;
            neither 0 nor the parent.
        without_hint: samples whose hint cannot be used because its teacher's files are gone, with the reason.
        lr_scale: the recipe's learning rate is multiplied by this: below 1 after rejected versions.
        held_out: judged turns that are not trained, on which the version is compared with its parent; the reward is the
            verdict.
        parent_scores: what is stored of the parent: the mean log-probability of held-out replies, see `HeldOutScore`.
        yardstick: replies by which lessons are measured.
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
    lr_scale: float = 1.0
    held_out: Sequence[BatchSample] = ()
    parent_scores: Mapping[SampleId, float] = field(default_factory=dict)
    yardstick: Sequence[YardstickReply] = ()

    @property
    def verdicts_and_units(self) -> list[tuple[int, UUID | None]]:
        """Verdict and unit of each held-out turn, by which the gate decides whether there are enough to compare."""
        return [(int(turn.reward or 0), turn.unit) for turn in self.held_out]


@dataclass(frozen=True, slots=True)
class YardstickReply:
    """A reply that was given with a lesson, by which the lesson is measured; never trained.

    Args:
        taught: the reply after the prompt that held the lesson.
        plain: the same reply after the prompt without it.
        new: the parent is scored too, with the lesson and without it.
    """

    taught: BatchSample
    plain: BatchSample
    new: bool


@dataclass(frozen=True, slots=True)
class YardstickScore:
    """Log-probs of a whole reply by which a lesson is measured, in nats.

    Args:
        reply: the sample id of its `YardstickReply`.
        version: under the trained version, without the lesson; None: the trainer could not read it, as below.
        taught, plain: of a new one under the version's parent, with the lesson and without it.
    """

    reply: SampleId
    version: float | None
    taught: float | None = None
    plain: float | None = None


@dataclass(frozen=True, slots=True)
class HeldOutScore:
    """A held-out turn's reply under a version and under its parent.

    Args:
        verdict: 1 for a praised reply, −1 for a blamed one.
        parent, version: mean log-probability of the reply's tokens, in nats.
        unit: see `BatchSample`; None: the turn is one of its own.
        sample: the turn's held-out sample, by which its scores are kept with both versions; None: they are not kept.
    """

    verdict: int
    parent: float
    version: float
    unit: UUID | None = None
    sample: SampleId | None = None

    @property
    def change(self) -> float:
        """Change of the mean log-probability of a token of the reply."""
        return self.version - self.parent


@dataclass(frozen=True, slots=True)
class SampleMetrics:
    """Figures of the trained tokens of one sample in one forward pass; None where a figure is not known.

    Args:
        tokens: number of trained tokens.
        ratio_mean, ratio_max: of ρ = π_θ/μ.
        mean_abs_log_ratio: mean |log ρ| in nats, unclipped; see `staleness.has_drifted`.
        clip_share: share of tokens whose gradient the clip removes.
        kl: mean distance to the base in nats (`kl.kl_distance`). Without that function's weight, one token that the
            policy has unlearned since it was sampled would dominate the mean: k3 grows with 1/π_θ.
        entropy: mean, in nats.
        bounded_ratio, bounded_kl: as `ratio_mean` and `kl`, but each token counts twice the recipe's bound at most.
    """

    tokens: int
    ratio_mean: float | None
    ratio_max: float | None
    mean_abs_log_ratio: float | None
    clip_share: float | None
    kl: float | None
    entropy: float | None
    bounded_ratio: float | None = None
    bounded_kl: float | None = None


@dataclass(frozen=True, slots=True)
class HintUse:
    """Part of a hint in what a sample taught.

    Args:
        place: of the hint among its judgement's.
        overlap: mean share of the likeliest ids that the teacher who read it has in common with the version that
            answered; None where distributions were not compared.
        distance: of the teacher from that version over the trained tokens, mean KL in nats; None likewise.
        share: of the reply's trained tokens that this hint taught: 1 or 0, unless the hint is chosen per token.
    """

    place: int
    overlap: float | None
    distance: float | None
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Distance of two versions on the trained tokens of a batch: |log π − log π'| in nats.

    Args:
        mean: each token counts `distances.TOKEN_LIMIT` at most, so that no single token can dominate it.
        median: half of the tokens are nearer.
        share: share of the tokens that are further apart than the recipe's `gate.token_distance`.
    """

    mean: float
    median: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Figures of a step, over all its ranks.

    Args:
        loss, parts: of the last training epoch; `parts` are weighted shares that add up to `loss`.
        grad_norm: of the last training epoch, before clipping.
        ratio: mean π_θ/μ over the batch's trained tokens, before the first update.
        kl: mean distance to the base in nats, as k3 estimates it, before the first update; None if the recipe has no
            KL part.
        tokens: trained tokens.
        samples: the trained samples, with their figures before the first update.
        dropped: samples left out, with the reason.
        without_hint: samples of which only the verdict was trained, with the reason.
        micro_batches, fillers: forwards of all ranks in one training epoch, and those of them without a sample.
        to_parent: how far the new version is from its parent; None if it was not measured.
        to_base: likewise from the base model; None if the recipe has no KL part.
        taught: the hints of each sample that had a teacher, in their order.
        advantages: of each token of a sample's reply, None for one that is not trained; without samples that have none.
        moves: by how much the step changed the log-probability of each token of a sample's reply, in nats, None for one
            that is not trained; empty unless the recipe asks for it.
        moves_seconds: how long the replies were read once more for that; None unless the recipe asks for it.
        distance_seconds: how long it took to read them and to compare the versions; None: not measured.
    """

    loss: float
    parts: Mapping[str, float]
    grad_norm: float
    ratio: float
    kl: float | None
    tokens: int
    samples: Mapping[SampleId, SampleMetrics]
    dropped: Mapping[SampleId, str]
    without_hint: Mapping[SampleId, str] = field(default_factory=dict)
    micro_batches: int
    fillers: int
    to_parent: Distance | None = None
    to_base: Distance | None = None
    taught: Mapping[SampleId, Sequence[HintUse]] = field(default_factory=dict)
    advantages: Mapping[SampleId, Sequence[float | None]] = field(default_factory=dict)
    moves: Mapping[SampleId, Sequence[float | None]] = field(default_factory=dict)
    moves_seconds: float | None = None
    distance_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """A step's adapter, on disk and not yet committed.

    Args:
        seconds: from the batch's arrival to the adapter's last byte.
        held_out: the scores of the batch's held-out turns, without those that cannot be scored.
        held_out_seconds: how long it took to score them, before the update and after it; None: not measured.
        yardstick: the scores of the batch's replies by which lessons are measured, as far as there are any.
    """

    version: VersionRef
    figures: StepFigures
    seconds: float
    held_out: Sequence[HeldOutScore] = ()
    held_out_seconds: float | None = None
    yardstick: Sequence[YardstickScore] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """The result of claiming a batch.

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
    """Training status of a policy, for people and for the training workflow, whose histories contain it.

    Args:
        reason: text: what training waits for, or why it is paused.
        ready: number of fresh samples.
        needed: number of samples of a full batch.
        judging: number of turns that wait for their next state or their judge.
        oldest_seconds: how long the oldest fresh sample has waited; None without one.
        step: the number of the claimed step, or of the next one.
        head: the newest committed version on the current lineage.
        version: the active version.
        epoch: how often the policy was rolled back; a step commits only in the epoch in which its batch was claimed.
        pinned: the version that stays active whatever is trained; None if none.
        unpublished: the head is not active yet, although nothing prevents it.
        max_wait_seconds: a smaller batch is claimed once its oldest sample has waited this long; None without a recipe.
        closed_seconds: the recipe's schedule lets no batch be claimed, and it is worth to look again after this long;
            None if one may be claimed.
        probed: the gate asks probes of the open step's version, by the step's own recipe, or else of the next one.
        general_unasked: the recipe has the general questions watch over content, and the base model was not asked yet.
        canary: the head, while only a share of the conversations gets it; None if there is no canary.
        canary_parent: the version that the other conversations get meanwhile; None if there is no canary.
        progress: what is done with the open step or the newest version; None: nothing.
        practises: the recipe has lessons practised.
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
    max_wait_seconds: float | None
    closed_seconds: float | None
    probed: bool
    general_unasked: bool
    canary: int | None
    canary_parent: int | None
    progress: StepProgress | None
    practises: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionView:
    """A version of a policy, for people.

    Args:
        parent: None for version 0.
        state: `active`, `pinned`, `head`, `on the path`, `rolled back`, `candidate`, `rejected: reason`, `abandoned`,
            `files removed`; several joined by commas.
        engines: names of the engines that have it loaded; every engine has version 0.
        metrics: its step's `StepFigures`, with numbers of samples instead of the samples; None for version 0.
        gate: what each check of the gate found; empty for version 0.
        gate_seconds: how long its checks took, without a canary; None: not measured.
        match: share of the requests of an evaluation, e.g. the demo's, that it answered as wanted; None: not measured.
        origin: what the policy began from; None: a step of its own made the version.
    """

    n: int
    parent: int | None
    state: str
    active: bool
    pinned: bool
    engines: Sequence[str]
    metrics: Mapping[str, JsonValue] | None
    created_at: datetime
    gate: Sequence[GateCheck] = ()
    gate_seconds: float | None = None
    match: float | None = None
    origin: VersionOrigin | None = None


# Probes ---------------------------------------------------------------------------------------------------------------
# Contracts of probes: prompts that the gate asks of a version and of its parent before the version answers.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeContent:
    """A probe's messages, and the content of a right answer; without `contains`, `regex` and `exact` it is unchecked.

    Args:
        tools: as a client offers them; None without tools.
        contains: texts that the answer has to contain, whatever their case.
        regex: a pattern, in the syntax of Rust's regex crate, that has to match anywhere in the answer.
        exact: the whole answer, apart from white space around it.
        thinks: a model that can think does, as in a chat; else it does not where it can leave it out.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    contains: Sequence[str] = ()
    regex: str | None = None
    exact: str | None = None
    thinks: bool = False

    @property
    def is_checked(self) -> bool:
        return bool(self.contains) or self.regex is not None or self.exact is not None


@dataclass(frozen=True, slots=True)
class StoredProbe:
    """A policy's probe.

    Args:
        general: one of our general questions, which the base model knows; else an operator's own.
    """

    id: ProbeId
    content: ProbeContent
    created_at: datetime
    general: bool = False


@dataclass(frozen=True, slots=True)
class AskedProbe:
    """A probe of a check.

    Args:
        id: the stored probe, or the praised turn that it was drawn from.
        general: see `StoredProbe`.
    """

    id: UUID
    content: ProbeContent
    general: bool = False


@dataclass(frozen=True, slots=True)
class JudgedReply:
    """A reply's length and the verdict on it.

    Args:
        verdict: 1 or −1.
    """

    tokens: int
    verdict: int


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """The gate's questions about a candidate, and the versions to ask.

    Args:
        base_model: the name under which engines serve version 0.
        parent: number of the version that the candidate is compared with.
        general_known: number of the general questions that the base model knows; None: it was not asked yet.
        judged: the newest replies with a verdict.
    """

    policy: str
    base_model: str
    candidate: VersionRef
    parent: int
    recipe: Recipe
    probes: Sequence[AskedProbe]
    general_known: int | None = None
    judged: Sequence[JudgedReply] = ()


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """An answer to a probe.

    Args:
        tool_calls: the arguments of each tool call as the model wrote them, by the name it called.
        cut: the limit of tokens ended it.
    """

    text: str
    tool_calls: Sequence[tuple[str, str]] = ()
    cut: bool = False


# Records of steps -----------------------------------------------------------------------------------------------------
# The stored record of a step, for programs that compare runs.


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The stored record of a step that made a version.

    Args:
        metrics: as in `VersionView`.
        at: when the version was made.
    """

    policy: str
    n: int
    metrics: Mapping[str, JsonValue]
    at: datetime
