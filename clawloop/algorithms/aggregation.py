"""From losses of tokens to the loss of a step.

Knows nothing about ranks or micro-batches except that there may be several: what a sum is divided by is
counted over the whole step and given, so that any split of a step adds up to the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from clawloop.algorithms.streams import Streams
from clawloop.errors import NothingToTrain

Aggregation: TypeAlias = Literal["token", "sequence"]
"""`token`: every trained token counts the same. `sequence`: every sample counts the same."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """How much a whole step trains: over all its micro-batches and ranks.

    Args:
        tokens: trained tokens.
        samples: samples with at least one trained token.
    """

    tokens: int
    samples: int

    @classmethod
    def of(cls, batch: Iterable[Streams]) -> Divisor:
        """Counts one part of a step; parts are added with `+`, ranks by an all-reduce of both numbers."""
        counts = [streams.trained_tokens for streams in batch]
        return cls(tokens=sum(counts), samples=len(counts))

    def __add__(self, other: Divisor) -> Divisor:
        return Divisor(self.tokens + other.tokens, self.samples + other.samples)


def aggregate(loss_N: Tensor, divisor: Divisor, aggregation: Aggregation) -> Tensor:
    """One sample's share of the step's loss.

    Args:
        loss_N: the losses of its trained tokens, and of no others.
        divisor: of the whole step. On several ranks whose gradients are averaged, multiply the sum by their
            number.
        aggregation: what counts the same.

    Raises:
        NothingToTrain: no token, or a divisor of zero.
    """
    if loss_N.numel() == 0 or divisor.tokens < loss_N.numel() or divisor.samples < 1:
        raise NothingToTrain(f"{loss_N.numel()} tokens of a step that counts {divisor.tokens}")
    if aggregation == "token":
        return loss_N.sum() / divisor.tokens
    return loss_N.mean() / divisor.samples
