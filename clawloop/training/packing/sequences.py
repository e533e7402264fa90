"""Token sequences of samples, and the limits on what the trainer packs into a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from clawloop.errors import SampleUnusable


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """A prompt and the response sampled after it.

    Args:
        key: names the sequence in errors, e.g. the sample's id.
        prompt_ids: at least one.
        response_ids: at least one.
        temperature: recorded when sampling, > 0; logits are divided by it.

    Raises:
        SampleUnusable: no prompt, no response, or a temperature that is not finite and above 0.
    """

    key: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    temperature: float

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids:
            raise SampleUnusable(self.key, "prompt and response need at least one token each")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise SampleUnusable(self.key, f"temperature {self.temperature} cannot be trained")

    @property
    def input_tokens(self) -> int:
        """Number of tokens the model takes as input: all but the last response token, which is only predicted."""
        return len(self.prompt_ids) + len(self.response_ids) - 1

    def input_ids(self) -> list[int]:
        """The tokens the model takes as input."""
        return [*self.prompt_ids, *self.response_ids[:-1]]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of samples and micro-batches.

    Args:
        budget_tokens: input tokens of one micro-batch, a shared prefix counted once. A longer sample gets a micro-batch
            of its own, which samples that share most of their tokens with it may join, see `capacity`.
        max_tokens: input tokens of one sample, bounded by the model's positions or the memory.
        vocab_size: ids at or above it raise (on a GPU they would end the process).
        share_prefixes: compute a shared prefix once; False to measure what that saves.
    """

    budget_tokens: int
    max_tokens: int
    vocab_size: int
    share_prefixes: bool = True

    def capacity(self, longest: int | None) -> int:
        """Maximum tokens of a micro-batch after one more sample joins it.

        The prompts of one chat may each fill the budget and differ in their last few hundred tokens only. Under the
        plain budget each would be computed alone, from its first token on, so such samples may exceed it by half.

        Args:
            longest: length of the longest sample in the micro-batch, this one included, that shares most of its tokens
                with this one; None if none does.
        """
        if longest is None:
            return self.budget_tokens
        return max(self.budget_tokens, longest + self.budget_tokens // 2)
