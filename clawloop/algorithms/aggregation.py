"""Token losses aggregated to a step's loss.

Every sum is divided by a count over the whole step, which the caller passes in, so that any split of a step into
micro-batches and ranks adds up to the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from clawloop.algorithms.streams import Streams
from clawloop.errors import NothingToTrain

Aggregation: TypeAlias = Literal["token", "sequence"]
"""`token`: every trained token has the same weight. `sequence`: every sequence has the same weight: a sample of a chat,
or all samples of an episode together."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """Trained tokens and samples of a whole step, over all its micro-batches and ranks.

    Args:
        tokens: trained tokens.
        samples: samples with at least one trained token.
        sequences: number of sequences among the samples; None if each sample is one.
    """

    tokens: int
    samples: int
    sequences: int | None = None

    @classmethod
    def of(cls, batch: Iterable[Streams]) -> Divisor:
        """Counts one part of a step. Parts are added with `+`, also across ranks."""
        counts = [streams.trained_tokens for streams in batch]
        return cls(tokens=sum(counts), samples=len(counts))

    def __add__(self, other: Divisor) -> Divisor:
        return Divisor(self.tokens + other.tokens, self.samples + other.samples)


def aggregate(loss_N: Tensor, divisor: Divisor, aggregation: Aggregation, sequence_tokens: int | None = None) -> Tensor:
    """One sample's share of the step's loss, a scalar.

    Args:
        loss_N: float[N], losses of the sample's trained tokens only.
        divisor: of the whole step. If gradients are averaged over ranks, multiply the sum by the number of ranks.
        aggregation: whether tokens or sequences have the same weight.
        sequence_tokens: trained tokens of the sample's whole sequence; None if the sample is one by itself.

    Raises:
        NothingToTrain: no token, or a divisor of zero.
    """
    if loss_N.numel() == 0 or divisor.tokens < loss_N.numel() or divisor.samples < 1:
        raise NothingToTrain(f"{loss_N.numel()} tokens of a step that counts {divisor.tokens}")
    if aggregation == "token":
        return loss_N.sum() / divisor.tokens
    return loss_N.sum() / (sequence_tokens or loss_N.numel()) / (divisor.sequences or divisor.samples)
