"""The samples of a batch as token sequences, and which of them can be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from clawloop.core.contracts.training import BatchSample, StepBatch
from clawloop.core.errors import NothingToTrain, SampleUnusable
from clawloop.core.ids import SampleId
from clawloop.core.recipes.recipe import Train
from clawloop.training.packing import Limits, TokenSequence, check_limits


def plain_sequence(sample: BatchSample) -> TokenSequence:
    """The prompt as it was served, and the response.

    Raises:
        SampleUnusable: lengths disagree, prompt or response is empty, or the temperature is not above 0.
    """
    for what, values in (("log-probs", sample.logprobs), ("mask", sample.response_mask)):
        if values is not None and len(values) != len(sample.response_ids):
            raise SampleUnusable(
                str(sample.sample_id), f"{what} of length {len(values)} for {len(sample.response_ids)} response tokens"
            )
    return TokenSequence(str(sample.sample_id), sample.prompt_ids, sample.response_ids, sample.temperature)


def hinted_sequence(sample: BatchSample, place: int = 0) -> TokenSequence:
    """The same response after the prompt with one of the sample's hints.

    Raises:
        SampleUnusable: see `plain_sequence`.
    """
    key = f"{sample.sample_id} with hint"
    return TokenSequence(key, sample.hinted_prompts[place], sample.response_ids, sample.temperature)


@dataclass(frozen=True, slots=True)
class TrainableBatch:
    """The samples of a batch that can be trained.

    Args:
        samples: those that can be trained, without a hint that cannot be used.
        unusable: samples that cannot be trained, with the reason.
        without_hint: samples that are trained without their hint, with the reason.
    """

    samples: list[BatchSample]
    unusable: dict[SampleId, str]
    without_hint: dict[SampleId, str]


def select_trainable(step: StepBatch, limits: Limits) -> TrainableBatch:
    """Checks each sample of a step against the limits.

    Raises:
        NothingToTrain: no sample is left.
    """
    batch = TrainableBatch([], {}, {})
    for sample in step.samples:
        try:
            check_limits(plain_sequence(sample), limits)
            sample, problem = _with_usable_hints(sample, step.recipe.train, limits)
            if problem is not None:
                batch.without_hint[sample.sample_id] = problem
        except SampleUnusable as error:
            batch.unusable[sample.sample_id] = error.reason
        else:
            batch.samples.append(sample)
    if not batch.samples:
        reasons = "; ".join(sorted(set(batch.unusable.values())))
        raise NothingToTrain(f"no sample of {len(step.samples)} can be trained: {reasons}")
    return batch


def _with_usable_hints(sample: BatchSample, recipe: Train, limits: Limits) -> tuple[BatchSample, str | None]:
    """The sample with the hints that the recipe may use and the teacher can read, and why there are none any more.

    Raises:
        SampleUnusable: the sample has nothing to learn from but hints, and none is usable.
    """
    usable: dict[int, Sequence[int]] = {}
    problem: SampleUnusable | None = None
    for place, prompt in sample.hinted_prompts.items() if recipe.uses_hints else ():
        try:
            check_limits(hinted_sequence(sample, place), limits)
            usable[place] = prompt
        except SampleUnusable as error:
            problem = problem or error
    if problem is not None and not recipe.places_read(usable) and not (recipe.uses_rewards and sample.reward):
        raise problem
    read = {place: usable[place] for place in recipe.documents_read(usable)}
    return replace(sample, hinted_prompts=read), None if read or problem is None else problem.reason
