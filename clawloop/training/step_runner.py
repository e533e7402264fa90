"""A base model kept in memory, and the steps taken on it for its policies, one after another.

Knows nothing about threads, the ledger or Temporal. Each step begins from its parent's files, never from what an
earlier step left in memory: after a step that failed half-way, or one of another policy, there is nothing to undo.
Under FSDP every rank holds one of these and calls it alike.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

import torch
from torch import Tensor

from clawloop.adapters.digest import check_version
from clawloop.contracts.training import BatchSample, StepBatch, StepFigures, TrainedStep, VersionRef
from clawloop.errors import AdapterUnusable, NothingToTrain, RecipeRejected, SampleUnusable, TrainerUnavailable
from clawloop.ids import SampleId
from clawloop.recipes import recipe as recipes
from clawloop.recipes.recipe import Recipe
from clawloop.training.adapters.checkpoint import begin, resume, save_version
from clawloop.training.adapters.files import BaseIdentity, WrittenVersion, adapter_lora, read_adapter
from clawloop.training.batch import TrainingSample
from clawloop.training.batch_signals import Progress
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.decoder import Lora, PolicyModel
from clawloop.training.model.loading import load_model
from clawloop.training.model.sharding import load_sharded_model
from clawloop.training.packing.collate import Limits, plan
from clawloop.training.ranks.ranks import Ranks
from clawloop.training.setup import TrainerSetup
from clawloop.training.step import StepReport, make_optimizer, train_step

Say = Callable[[str], None]


class StepRunner:
    """Takes steps; loads the base model at the first one, and again when its files or the LoRA shape change.

    Args:
        setup: which model, where, with what limits.
        ranks: who takes part; this process alone if None.
    """

    def __init__(self, setup: TrainerSetup, ranks: Ranks | None = None) -> None:
        self._setup = setup
        self._ranks = ranks or Ranks()
        self._device = setup.torch_device()
        self._model: PolicyModel | None = None
        self._stamp: tuple[tuple[str, int, int], ...] = ()
        self._fingerprint = ""

    @property
    def ranks(self) -> Ranks:
        return self._ranks

    def train(self, step: StepBatch, say: Say, should_stop: Callable[[], bool]) -> TrainedStep | None:
        """One step, to an adapter on disk; None on every rank but the first.

        Args:
            say: told what the step is at; on every rank.
            should_stop: asked between micro-batches; only the first rank's answer counts.

        Raises:
            StepDiverged, NothingToTrain, AdapterUnusable, ModelUnsupported: it will never work.
            RecipeRejected: the recipe does not fit the base model; the batch is good.
            TrainerUnavailable: it was asked to stop, has no room on the disk or the device, or holds another base.
        """
        try:
            return self._train(step, say, should_stop)
        except torch.OutOfMemoryError as error:
            if self._ranks.world > 1:
                raise  # perhaps on this rank alone
            torch.cuda.empty_cache()
            raise TrainerUnavailable("the GPU's memory is too small: lower --micro-batch-tokens") from error

    def _train(self, step: StepBatch, say: Say, should_stop: Callable[[], bool]) -> TrainedStep | None:
        began = time.monotonic()

        def pause(at: str) -> None:
            say(f"step {step.n}: {at}")
            if self._ranks.first(should_stop()):
                raise TrainerUnavailable("stopped between two micro-batches")

        pause("begins")
        model, base = self._model_for(step)
        pause("has its model")
        limits = Limits(
            min(self._setup.micro_batch_tokens, model.max_tokens), model.max_tokens, model.architecture.vocab_size
        )
        _require_top_k(step, limits.vocab_size)
        batch = _usable(step, limits)
        settings = step.recipe.train
        optimizer = make_optimizer(model, settings.optimiser)
        if step.parent is None:
            begin(model, optimizer, seed=_seed(step))
        else:
            resume(self._folder(step.parent), step.parent.sha256, model, optimizer, base)
        done = train_step(
            model,
            optimizer,
            batch.samples,
            settings,
            limits,
            parent=0 if step.parent is None else step.parent.n,
            read_version=lambda version: self._teacher(step, version, base),
            ranks=self._ranks,
            report=lambda progress: pause(_words(progress)),
        )
        written = self._save(step, model, optimizer, base)
        if written is None:
            return None
        path = written.path.relative_to(self._setup.adapters).as_posix()
        parent = 0 if step.parent is None else step.parent.n
        return TrainedStep(
            VersionRef(step.policy, step.n, parent, path, written.sha256),
            _figures(done, batch, time.monotonic() - began),
        )

    def _save(
        self, step: StepBatch, model: PolicyModel, optimizer: torch.optim.Optimizer, base: BaseIdentity
    ) -> WrittenVersion | None:
        # All ranks gather the tensors; then the first writes, alone, so the others need not hear of its errors.
        try:
            return save_version(
                self._setup.adapters / step.policy, step.n, model, optimizer, base, writes=self._ranks.is_first
            )
        except OSError as error:
            raise TrainerUnavailable(f"version {step.n} cannot be written: {error.strerror}") from error

    def _model_for(self, step: StepBatch) -> tuple[PolicyModel, BaseIdentity]:
        lora = _lora(step.recipe.train.lora)
        # Whatever a rank cannot read, all ranks must raise before they begin to wait for each other.
        with self._ranks.raise_on_all_ranks():
            self._setup.require_base(step.base_model)
            stamp = self._setup.files_stamp()
            if stamp != self._stamp:
                self._model = None
                self._fingerprint = BaseWeights(self._setup.model).fingerprint()
            base = BaseIdentity(name=step.base_model, fingerprint=self._fingerprint)
            for version in (step.parent, *step.teachers.values()):
                if version is not None:
                    self._check(version, lora)
        if self._model is None or self._model.lora != lora:
            self._model = None  # two do not fit
            make = load_model if self._ranks.world == 1 else load_sharded_model
            self._model = make(
                self._setup.model,
                lora,
                dtype=self._setup.torch_dtype(self._device),
                device=self._device,
                max_tokens=self._setup.max_tokens,
            )
        self._stamp = stamp
        return self._model, base

    def _check(self, version: VersionRef, lora: Lora) -> None:
        folder = self._folder(version)
        check_version(folder, version.sha256)
        if (found := adapter_lora(folder)) != lora:
            raise AdapterUnusable(
                f"version {version.n} has LoRA of rank {found.rank}, alpha {found.alpha:g}, the recipe asks for rank "
                f"{lora.rank}, alpha {lora.alpha:g}: set a recipe with the old shape, or roll back to version 0"
            )

    def _teacher(self, step: StepBatch, version: int, base: BaseIdentity) -> Mapping[str, Tensor]:
        if version not in step.teachers:
            raise AdapterUnusable(f"version {version} answered a sample with a hint, and its files are not there")
        assert self._model is not None
        folder = self._folder(step.teachers[version])
        return read_adapter(folder, self._model.architecture, base=base).tensors

    def _folder(self, version: VersionRef) -> Path:
        return self._setup.adapters / version.path


def _require_top_k(step: StepBatch, vocab_size: int) -> None:
    top_k = step.recipe.train.distillation.top_k
    if step.recipe.train.loss.distillation > 0 and top_k >= vocab_size:
        raise RecipeRejected(
            f"{top_k}, but {step.base_model} has a vocabulary of {vocab_size}, and one bin stands for what is beside "
            "the K: set it below that with `clawloop recipe set`, then `clawloop training resume`",
            field="train.distillation.top_k",
        )


@dataclass(frozen=True, slots=True)
class _Usable:
    """What of a batch can be trained.

    Args:
        unusable: samples that cannot be trained as they are, and why.
        without_hint: samples that are trained without their hint, and why.
    """

    samples: list[TrainingSample]
    unusable: dict[SampleId, str]
    without_hint: dict[SampleId, str]


def _usable(step: StepBatch, limits: Limits) -> _Usable:
    """
    Raises:
        NothingToTrain: nothing is left.
    """
    found = _Usable([], {}, {})
    for given in step.samples:
        try:
            sample = _sample(given)
            plan([sample.sequence()], limits)
            if (why := _hint_fault(sample, step.recipe, limits)) is not None:
                found.without_hint[given.sample_id] = why
                sample = replace(sample, hinted_prompt_ids=None)
        except SampleUnusable as error:
            found.unusable[given.sample_id] = error.reason
        else:
            found.samples.append(sample)
    if not found.samples:
        reasons = "; ".join(sorted(set(found.unusable.values())))
        raise NothingToTrain(f"no sample of {len(step.samples)} can be trained: {reasons}")
    return found


def _hint_fault(sample: TrainingSample, recipe: Recipe, limits: Limits) -> str | None:
    """Why the teacher cannot read the sample's hint, whose verdict still teaches; None if nothing is wrong.

    Raises:
        SampleUnusable: it has nothing to teach but the hint.
    """
    if not recipe.train.uses_hints or sample.hinted_prompt_ids is None:
        return None
    try:
        plan([sample.hinted_sequence()], limits)
    except SampleUnusable as error:
        if not (recipe.train.uses_rewards and sample.reward):
            raise
        return error.reason
    return None


def _sample(given: BatchSample) -> TrainingSample:
    return TrainingSample(
        key=str(given.sample_id),
        prompt_ids=given.prompt_ids,
        response_ids=given.response_ids,
        behaviour_logprobs=given.logprobs,
        temperature=given.temperature,
        version=given.version,
        reward=given.reward,
        hinted_prompt_ids=given.hinted_prompt_ids,
        explicit=given.explicit,
    )


def _figures(done: StepReport, batch: _Usable, seconds: float) -> StepFigures:
    dropped = {SampleId(UUID(key)): reason for key, reason in done.dropped.items()}
    return StepFigures(
        loss=done.loss,
        parts=done.parts,
        grad_norm=done.grad_norm,
        ratio=done.ratio,
        kl=done.kl,
        tokens=done.tokens,
        samples=len(done.samples),
        dropped=dropped | batch.unusable,
        # One that was dropped all the same was trained without anything.
        without_hint={sample: why for sample, why in batch.without_hint.items() if sample not in dropped},
        seconds=seconds,
    )


def _lora(asked: recipes.Lora) -> Lora:
    return Lora(asked.rank, asked.alpha)


def _seed(step: StepBatch) -> int:
    """Of a policy's first adapter: another for each policy and recipe, the same whenever the step is tried."""
    told = f"{step.policy} {step.recipe.train.hash}".encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:4], "big")


def _words(progress: Progress) -> str:
    return f"{progress.stage} {progress.done} of {progress.of}"
