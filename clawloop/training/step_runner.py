"""Runs steps on a base model kept in memory, one after another, for all policies of that base."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from clawloop.core.adapters.directory import check_version
from clawloop.core.contracts.training import (
    BatchSample,
    HeldOutScore,
    Pace,
    StatusCallback,
    StepBatch,
    StepFigures,
    TrainedStep,
    VersionRef,
    YardstickScore,
)
from clawloop.core.crash_points import CrashPoint, crash_point
from clawloop.core.errors import (
    AdapterUnreadable,
    AdapterUnusable,
    RankOutOfMemory,
    RecipeRejected,
    StepTooLarge,
    TrainerFailed,
    TrainerUnavailable,
)
from clawloop.core.gate.checks import lacking_turns
from clawloop.core.ids import SampleId
from clawloop.core.recipes import recipe as recipes
from clawloop.core.recipes.recipe import require_decoupled
from clawloop.training.adapters.files import (
    BaseIdentity,
    WrittenVersion,
    adapter_lora,
    begin,
    read_adapter,
    require_room,
    resume,
    save_version,
    write_error,
)
from clawloop.training.batch import TrainableBatch, select_trainable
from clawloop.training.memory import (
    REMEDY,
    SHARE_LEFT_OUT,
    is_out_of_memory,
    left_out_reason,
    tokens_of,
    train_within_memory,
)
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.checkpoint import end_tokens
from clawloop.training.model.loading import load_model, load_sharded_model
from clawloop.training.model.port import LoraShape, PolicyModel
from clawloop.training.packing import Limits
from clawloop.training.ranks import Ranks
from clawloop.training.scoring import fits, score_replies
from clawloop.training.setup import TrainerSetup
from clawloop.training.step import make_optimizer, train_step

# Attempts -------------------------------------------------------------------------------------------------------------
# Memory limits that the attempts at a step found, in a file beside the versions, since a killed process reports none.
#
# Ranks that divide the base model (FSDP) cannot agree on less when one of them runs out of memory, because the others
# wait for it in a collective: all of them end, and are started again. The kernel kills a process that runs out of
# memory without an error. In both cases the next attempt finds the record of an attempt that did not end by itself,
# and takes smaller micro-batches.

MOST_DEATHS = 5
"""Attempts at a step that may run out of memory; as many as may fail with an error."""
_KILLED: Final = "the kernel killed the trainer or a rank, as it does when memory runs out"
_RAN_OUT: Final = "a rank ran out of memory"


class Attempt(BaseModel):
    """Sizes of an attempt at a step.

    Args:
        batch: hash of the step's number and samples; the record of another batch says nothing about this one.
        budget_tokens: of its micro-batches.
        left_out: samples, with the reason.
        deaths: earlier attempts at this batch that ended because memory ran out.
        oom_kills: number of programs that the kernel had killed before the attempt began, see `oom_kills`.
        under_way: False once the attempt has ended by itself.
        before: why the previous attempt ended, if memory ran out.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    batch: str
    budget_tokens: int
    left_out: Mapping[SampleId, str] = {}
    deaths: int = 0
    oom_kills: int | None = None
    under_way: bool = True
    before: str | None = None

    def limits(self, limits: Limits) -> Limits:
        return replace(limits, budget_tokens=self.budget_tokens)

    def remaining(self, samples: Sequence[BatchSample]) -> list[BatchSample]:
        return [sample for sample in samples if sample.sample_id not in self.left_out]


def oom_kills() -> int | None:
    """Processes killed by the kernel's OOM killer, of the machine or of one container, since the machine started.

    None if the kernel does not tell. The count covers all containers of a machine, also after one of them is replaced.
    """
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="ascii"), re.MULTILINE)
        return None if found is None else int(found[1])
    return None


class AttemptRecord:
    """The file of a policy, which has one step at a time.

    Args:
        adapters: folder of all versions.
    """

    def __init__(self, adapters: Path, policy: str) -> None:
        self._file = adapters / f".attempt-{policy}.json"
        self._ran_out = adapters / f".attempt-{policy}.out-of-memory"

    def begin(self, step: StepBatch, samples: Sequence[BatchSample], limits: Limits) -> Attempt:
        """Sizes of this attempt, smaller than after running out of memory; called on the first rank."""
        batch = _digest(step)
        last = self._read()
        attempt = Attempt(batch=batch, budget_tokens=limits.budget_tokens)
        if last is not None and last.batch == batch:
            budget = min(last.budget_tokens, limits.budget_tokens)  # the setting may be lower now
            attempt = last.model_copy(update={"under_way": True, "before": None, "budget_tokens": budget})
            if (ending := self._ending(last)) is not None:
                attempt = _with_less(attempt, samples, ending)
        with suppress(OSError):
            self._ran_out.unlink(missing_ok=True)
        return self.write(attempt.model_copy(update={"oom_kills": oom_kills()}))

    @contextmanager
    def kept(self, ranks: Ranks) -> Iterator[None]:
        """While the block runs, the record is that of an attempt under way."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                with suppress(OSError):
                    self._ran_out.touch()  # by whichever rank it was
            elif ranks.world_size == 1:
                self._forget()  # with several ranks another rank may have died, perhaps of a lack of memory
            raise
        except Exception as error:
            if ranks.is_first:
                self._end(error)
            raise
        if ranks.is_first:
            self._forget()

    def _end(self, error: Exception) -> None:
        """Keep the limits of a stopped attempt; forget them after a failure, since memory may be free again."""
        last = self._read()
        is_stopped = isinstance(error, TrainerUnavailable | AdapterUnreadable) and not isinstance(error, TrainerFailed)
        if is_stopped and last is not None:
            self.write(last.model_copy(update={"under_way": False}))
        else:
            self._forget()

    def write(self, attempt: Attempt) -> Attempt:
        # Without a record the next attempt takes as much as this one; nothing else depends on it.
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._file.with_suffix(".unfinished")
            unfinished.write_text(attempt.model_dump_json(), encoding="utf-8")
            unfinished.replace(self._file)
        return attempt

    def ending(self) -> str | None:
        """The reason that the latest attempt ended, if that was a lack of memory."""
        last = self._read()
        return None if last is None else self._ending(last)

    def _read(self) -> Attempt | None:
        try:
            return Attempt.model_validate_json(self._file.read_bytes())
        except (OSError, ValidationError):
            return None

    def _forget(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _ending(self, last: Attempt) -> str | None:
        """The reason that an attempt ended, if that was a lack of memory."""
        if not last.under_way:
            return None
        if self._ran_out.exists():
            return _RAN_OUT
        now = oom_kills()
        # Unknown: a process that ends without an error was most often killed for memory; smaller batches do no harm.
        if now is None or last.oom_kills is None or now > last.oom_kills:
            return _KILLED
        return None


def require_fewer_deaths(attempt: Attempt) -> None:
    """
    Raises:
        StepTooLarge: memory ended five attempts at this batch.
    """
    if attempt.deaths >= MOST_DEATHS:
        raise StepTooLarge(
            f"out of memory: {attempt.before}, at {attempt.deaths} attempts, the last with micro-batches of"
            f" {attempt.budget_tokens} tokens at most; {REMEDY}"
        )


def _with_less(attempt: Attempt, samples: Sequence[BatchSample], ending: str) -> Attempt:
    """Half of the micro-batches' tokens, or without the longest sample if it fills the largest micro-batch alone.

    As much again once half of the samples are left out: then the memory is at fault, and after five deaths it says so.
    """
    found = {"deaths": attempt.deaths + 1, "before": ending}
    remaining = attempt.remaining(samples)
    if found["deaths"] == MOST_DEATHS or not remaining:
        return attempt.model_copy(update=found)
    longest = max(remaining, key=tokens_of)
    if attempt.budget_tokens > tokens_of(longest):
        return attempt.model_copy(update={**found, "budget_tokens": max(1, attempt.budget_tokens // 2)})
    if len(attempt.left_out) + 1 > SHARE_LEFT_OUT * len(samples):
        return attempt.model_copy(update=found)
    left_out = {**attempt.left_out, longest.sample_id: left_out_reason(longest)}
    return attempt.model_copy(update={**found, "left_out": left_out})


def _digest(step: StepBatch) -> str:
    samples = ",".join(str(sample.sample_id) for sample in step.samples)
    return hashlib.sha256(f"{step.n} {samples}".encode()).hexdigest()


# The runner -----------------------------------------------------------------------------------------------------------
# Runs steps on a base model kept in memory, one after another, for all policies of that base.
#
# Each step begins from its parent's files, never from what an earlier step left in memory, so there is nothing to undo
# after a failed step or one of another policy. Every rank has a runner and makes the same calls.

log = logging.getLogger(__name__)


class StepRunner:
    """Runs steps; loads the base model at the first one, and again when its files or the LoRA shape change.

    Args:
        setup: model, folders, device and limits.
        ranks: the ranks that take each step; this process alone if None.
    """

    def __init__(self, setup: TrainerSetup, ranks: Ranks | None = None) -> None:
        self._setup = setup
        self._ranks = ranks or Ranks()
        self._device = setup.torch_device()
        setup.note_device(self._device)
        log.info("trainer's device", extra={"device": str(self._device), "rank": self._ranks.rank})
        self._model: PolicyModel | None = None
        self._stamp: tuple[tuple[str, int, int], ...] = ()
        self._fingerprint = ""

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    def memory_ending(self, step: StepBatch) -> str | None:
        """The reason that the latest attempt at this step failed, if memory ran out on any rank."""
        return AttemptRecord(self._setup.adapters, step.policy).ending()

    def train(self, step: StepBatch, report: StatusCallback, should_stop: Callable[[], bool]) -> TrainedStep | None:
        """Trains one step and writes its adapter; returns None on every rank but the first.

        Args:
            report: called on every rank with the step's progress.
            should_stop: called between micro-batches; only the first rank's answer counts.

        Raises:
            StepDiverged, NothingToTrain, AdapterUnusable: permanent.
            AdapterUnreadable: a retry may find the disk again.
            ModelUnsupported: the base model cannot be loaded; the batch is good.
            RecipeRejected: the recipe does not fit the base model; the batch is good.
            DiskFull: there is no room for the version; the batch is good.
            TrainerFailed: there is no memory for the base model, or for most of the samples.
            StepTooLarge: memory ended five attempts at this step.
            TrainerUnavailable: the step was stopped, or the base model is another.
        """
        try:
            return self._train(step, report, should_stop)
        except RuntimeError as error:
            if self._ranks.world_size > 1 or not is_out_of_memory(error):
                raise  # of several ranks it is maybe this one only
            self._model = None
            raise TrainerFailed(f"out of memory: the base model and one step do not fit; {REMEDY}") from error

    def _train(self, step: StepBatch, report: StatusCallback, should_stop: Callable[[], bool]) -> TrainedStep | None:
        started = time.monotonic()

        def report_or_stop(status: str, pace: Pace | None = None) -> None:
            report(f"step {step.n}: {status}", pace)
            if self._ranks.broadcast(should_stop()):
                raise TrainerUnavailable("stopped between two micro-batches")

        report_or_stop("loading the model")
        _require_decoupled(self._setup, step)
        model, base = self._model_for(step)
        report_or_stop("model loaded")
        with self._ranks.raise_on_all_ranks():
            # float32 weights, and both moments of AdamW.
            version_bytes = 12 * sum(parameter.numel() for parameter in model.adapter_parameters().values())
            require_room(self._setup.adapters, version_bytes, self._setup.kept_free_bytes)
        limits = limits_of(model, self._setup.micro_batch_tokens)
        _require_top_k(step, limits.vocab_size)
        batch = select_trainable(step, limits)
        settings = step.recipe.train
        ends = end_tokens(self._setup.model) if settings.distillation.spare_end else frozenset()
        # The optimiser's state stays the parent's; only how far its update goes is scaled.
        scaled = settings.optimiser.model_copy(update={"lr": settings.optimiser.lr * step.lr_scale})
        optimizer = make_optimizer(model, scaled)
        parent = 0 if step.parent is None else step.parent.n

        # Where there are too few to decide by, none is scored.
        turns = () if lacking_turns(step.verdicts_and_units) is not None else step.held_out
        held_out: list[HeldOutScore] = []
        held_out_seconds = 0.0
        yardstick: list[YardstickScore] = []

        def train(samples: Sequence[BatchSample], within: Limits) -> StepFigures:
            nonlocal held_out_seconds
            if step.parent is None:
                begin(model, optimizer, seed=_seed(step))
            else:
                # The disk may have gone, for one rank, since all of them checked the version.
                with self._ranks.raise_on_all_ranks():
                    resume(self._folder(step.parent), step.parent.sha256, model, optimizer, base)
            began = time.monotonic()
            unknown = [turn for turn in turns if turn.sample_id not in step.parent_scores]
            before = {**step.parent_scores, **self._score_held_out(model, unknown, within, report_or_stop)}
            held_out_seconds = time.monotonic() - began
            readable = [one for one in step.yardstick if fits(one.taught, within) and fits(one.plain, within)]
            new = [reply for reply in readable if reply.new]
            taught = self._score_yardstick(model, [reply.taught for reply in new], within, report_or_stop)
            plain = self._score_yardstick(model, [reply.plain for reply in new], within, report_or_stop)
            figures = train_step(
                model,
                optimizer,
                samples,
                settings,
                within,
                parent=parent,
                read_version=lambda version: self._read_teacher(step, version, base),
                ranks=self._ranks,
                on_progress=lambda progress: report_or_stop(str(progress), progress.pace),
                token_distance=step.recipe.gate.token_distance,
                end_tokens=ends,
            )
            began = time.monotonic()
            known = [turn for turn in turns if turn.sample_id in before]
            after = self._score_held_out(model, known, within, report_or_stop)
            held_out_seconds += time.monotonic() - began
            held_out[:] = [
                HeldOutScore(int(turn.reward or 0), before[sample], after[sample], turn.unit, sample)
                for turn in known
                if (sample := turn.sample_id) in after
            ]
            now = self._score_yardstick(model, [reply.plain for reply in readable], within, report_or_stop)
            yardstick[:] = [
                YardstickScore(reply, now[reply], taught.get(reply), plain.get(reply))
                for reply in (one.plain.sample_id for one in readable)
                if reply in now  # else memory ran out: a later step may score it
            ]
            unread = [one.plain.sample_id for one in step.yardstick if one not in readable]
            yardstick.extend(YardstickScore(reply, None) for reply in unread)
            return figures

        record = AttemptRecord(self._setup.adapters, step.policy)
        attempt = self._begin_attempt(record, step, batch.samples, limits, report_or_stop)

        def write_less(within: Limits, left_out: Mapping[SampleId, str]) -> None:
            if self._ranks.is_first:
                less = {"budget_tokens": within.budget_tokens, "left_out": {**attempt.left_out, **left_out}}
                record.write(attempt.model_copy(update=less))

        with record.kept(self._ranks):
            figures, left_out = train_within_memory(
                train,
                attempt.remaining(batch.samples),
                attempt.limits(limits),
                report_or_stop,
                alone=self._ranks.world_size == 1,
                on_less=write_less,
            )
            batch.unusable.update({**attempt.left_out, **left_out})
            report_or_stop("writing the adapter")
            crash_point(CrashPoint.STEP_NOT_SAVED)
            written = self._save(step, model, optimizer, base)
        if written is None:
            return None
        path = written.path.relative_to(self._setup.adapters).as_posix()
        version = VersionRef(step.policy, step.n, parent, path, written.sha256)
        taken = time.monotonic() - started
        return TrainedStep(version, _with_excluded(figures, batch), taken, held_out, held_out_seconds, yardstick)

    def _begin_attempt(
        self,
        record: AttemptRecord,
        step: StepBatch,
        samples: Sequence[BatchSample],
        limits: Limits,
        report: StatusCallback,
    ) -> Attempt:
        """Sizes of this attempt, the same on all ranks: smaller than those of an attempt that ran out of memory."""
        own = record.begin(step, samples, limits) if self._ranks.is_first else None
        attempt = self._ranks.broadcast(own)
        assert attempt is not None  # the first rank's
        require_fewer_deaths(attempt)
        if attempt.before is not None:
            without = f", without {len(attempt.left_out)} samples" if attempt.left_out else ""
            again = f"again with micro-batches of {attempt.budget_tokens} tokens{without}"
            log.warning("the last attempt ended", extra={"step": step.n, "why": attempt.before, "now": again})
            report(f"{attempt.before}; {again}")
        return attempt

    def _score_yardstick(
        self, model: PolicyModel, replies: Sequence[BatchSample], limits: Limits, report_or_stop: StatusCallback
    ) -> dict[SampleId, float]:
        """Log-probability of each whole reply by which lessons are measured."""
        lengths = {reply.sample_id: len(reply.response_ids) for reply in replies}
        means = self._score_replies(model, replies, limits, report_or_stop, "replies that lessons are measured by")
        return {reply: mean * lengths[reply] for reply, mean in means.items()}

    def _score_held_out(
        self, model: PolicyModel, turns: Sequence[BatchSample], limits: Limits, report_or_stop: StatusCallback
    ) -> dict[SampleId, float]:
        """Mean log-probability of each held-out reply. Without any the version is compared by its numbers alone."""
        return self._score_replies(model, turns, limits, report_or_stop, "held-out turns")

    def _score_replies(
        self,
        model: PolicyModel,
        turns: Sequence[BatchSample],
        limits: Limits,
        report_or_stop: StatusCallback,
        stage: str,
    ) -> dict[SampleId, float]:
        """Mean log-probability of each reply under the model's present weights; without any if memory runs out."""
        if not turns:
            return {}
        try:
            means = score_replies(
                model,
                turns,
                limits,
                self._ranks,
                lambda progress: report_or_stop(f"{stage}: {progress}"),
            )
            return {turns[place].sample_id: mean for place, mean in means.items()}
        except RankOutOfMemory:
            return {}
        except RuntimeError as error:
            if self._ranks.world_size > 1 or not is_out_of_memory(error):
                raise
            return {}

    def _save(
        self, step: StepBatch, model: PolicyModel, optimizer: torch.optim.Optimizer, base: BaseIdentity
    ) -> WrittenVersion | None:
        # All ranks gather the tensors; then only the first writes, so its errors need not be raised on the others.
        try:
            return save_version(
                self._setup.adapters / step.policy, step.n, model, optimizer, base, writes=self._ranks.is_first
            )
        except OSError as error:
            raise write_error(step.n, error) from error

    def _model_for(self, step: StepBatch) -> tuple[PolicyModel, BaseIdentity]:
        lora = _lora(step.recipe.train.lora)
        # A file that one rank cannot read must raise on all ranks before they wait for each other.
        with self._ranks.raise_on_all_ranks():
            self._setup.require_base(step.base_model)
            stamp = self._setup.files_stamp()
            if stamp != self._stamp:
                self._model = None
                self._fingerprint = BaseWeights(self._setup.model).fingerprint()
            base = BaseIdentity(name=step.base_model, fingerprint=self._fingerprint)
            for version in (step.parent, *step.teachers.values()):
                if version is not None:
                    self._check_version(version, lora)
        if self._model is None or self._model.lora != lora:
            self._model = None  # two models do not fit into memory
            shards = self._ranks.world_size > 1 and self._setup.ranks == "sharded"
            make = load_sharded_model if shards else load_model
            self._model = make(
                self._setup.model,
                lora,
                dtype=self._setup.torch_dtype(self._device),
                device=self._device,
                max_tokens=self._setup.max_tokens,
                backend=self._setup.backend,
                recompute_beyond=self._setup.recompute_beyond,
                quantisation=self._setup.quantise,
            )
        self._stamp = stamp
        return self._model, base

    def _check_version(self, version: VersionRef, lora: LoraShape) -> None:
        folder = self._folder(version)
        check_version(folder, version.sha256)
        if (stored := adapter_lora(folder)) != lora:
            raise AdapterUnusable(
                f"version {version.n} has LoRA of rank {stored.rank}, alpha {stored.alpha:g}, the recipe asks for rank "
                f"{lora.rank}, alpha {lora.alpha:g}: set a recipe with the old shape, or roll back to version 0"
            )

    def _read_teacher(self, step: StepBatch, version: int, base: BaseIdentity) -> Mapping[str, Tensor]:
        if version not in step.teachers:
            raise AdapterUnusable(f"version {version} is the teacher of a hint, but its files are gone")
        folder = self._folder(step.teachers[version])
        return read_adapter(folder, base=base).tensors

    def _folder(self, version: VersionRef) -> Path:
        return self._setup.adapters / version.path


def limits_of(model: PolicyModel, micro_batch_tokens: int) -> Limits:
    """The limits of samples and micro-batches on this model: one that does not pack gets each document alone."""
    budget = min(micro_batch_tokens, model.max_tokens) if model.packs_documents else 1
    return Limits(budget, model.max_tokens, model.vocab_size, share_prefixes=model.packs_documents)


def _require_decoupled(setup: TrainerSetup, step: StepBatch) -> None:
    if setup.quantise is None and not setup.engines_quantised:
        return
    quantised = "trainer's base model" if setup.quantise is not None else "engines' model"
    require_decoupled(
        step.recipe,
        f"the {quantised} is quantised, so engine and trainer compute with different weights",
        "with `clawloop recipe set`, then `clawloop training resume`",
    )


def _require_top_k(step: StepBatch, vocab_size: int) -> None:
    top_k = step.recipe.train.distillation.top_k
    if step.recipe.train.loss.distillation > 0 and top_k >= vocab_size:
        raise RecipeRejected(
            f"{top_k}, but {step.base_model} has {vocab_size} token ids, and at least one must be left for the "
            "tail: set it lower with `clawloop recipe set`, then `clawloop training resume`",
            field="train.distillation.top_k",
        )


def _with_excluded(figures: StepFigures, batch: TrainableBatch) -> StepFigures:
    """The figures, with the samples that did not reach the step, and those that were trained without their hint."""
    without_hint = {sample: why for sample, why in batch.without_hint.items() if sample not in figures.dropped}
    return replace(figures, dropped={**figures.dropped, **batch.unusable}, without_hint=without_hint)


def _lora(settings: recipes.Lora) -> LoraShape:
    return LoraShape(settings.rank, settings.alpha)


def _seed(step: StepBatch) -> int:
    """Seed of a policy's first adapter: depends on policy and recipe, and is the same for every retry of the step."""
    key = f"{step.policy} {step.recipe.train.hash}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big")
