"""Reaction of a step to a lack of memory: smaller micro-batches, then the longest sample is left out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from clawloop.core.contracts.training import BatchSample, StatusCallback, StepFigures
from clawloop.core.errors import RankOutOfMemory, TrainerFailed
from clawloop.core.ids import SampleId
from clawloop.training.packing import Limits

REMEDY = "lower --micro-batch-tokens or --max-tokens; `clawloop plan` says what fits"
# If a batch loses more than this share of its samples, the memory is at fault and not the samples.
SHARE_LEFT_OUT = 0.5


def is_out_of_memory(error: RuntimeError) -> bool:
    """True if a device could not allocate: CUDA's error has a type, the CPU allocator's is known by its text."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def train_within_memory(
    train: Callable[[Sequence[BatchSample], Limits], StepFigures],
    samples: Sequence[BatchSample],
    limits: Limits,
    report: StatusCallback,
    *,
    alone: bool = True,
    on_less: Callable[[Limits, Mapping[SampleId, str]], None] = lambda limits, left_out: None,
) -> tuple[StepFigures, dict[SampleId, str]]:
    """Trains on these samples, again and with less at once each time memory runs out.

    Args:
        train: begins from the parent's files each time.
        limits: those of the first attempt.
        alone: False on one of several ranks: what other ranks do not know of ends it.
        on_less: called before each further attempt, with its limits and all samples left out so far.

    Returns:
        The step's figures, and the samples that were left out, with the reason.

    Raises:
        TrainerFailed: more than half of the samples do not fit.
    """
    remaining = list(samples)
    left_out: dict[SampleId, str] = {}
    while True:
        try:
            return train(remaining, limits), left_out
        except RankOutOfMemory:
            pass  # on all ranks, which go on alike: they have the same samples and limits
        except RuntimeError as error:
            if not (alone and is_out_of_memory(error)):
                raise
        # Not inside `except`: the error's frames hold the tensors of the failed forward.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if limits.budget_tokens > min(map(tokens_of, remaining)):
            limits = replace(limits, budget_tokens=max(1, limits.budget_tokens // 2))
            report(f"out of memory; again with micro-batches of {limits.budget_tokens} tokens")
            on_less(limits, left_out)
            continue
        longest = max(remaining, key=tokens_of)
        remaining.remove(longest)
        left_out[longest.sample_id] = left_out_reason(longest)
        if len(left_out) > SHARE_LEFT_OUT * len(samples):
            raise TrainerFailed(f"out of memory: {len(left_out)} of {len(samples)} samples do not fit alone; {REMEDY}")
        report(f"out of memory; again without a sample of {tokens_of(longest)} tokens")
        on_less(limits, left_out)


def left_out_reason(sample: BatchSample) -> str:
    return f"out of memory: {tokens_of(sample)} tokens do not fit, not even alone"


def tokens_of(sample: BatchSample) -> int:
    """Number of tokens of the sample's longest document."""
    prompts = [sample.prompt_ids, *sample.hinted_prompts.values()]
    return max(map(len, prompts)) + len(sample.response_ids)
