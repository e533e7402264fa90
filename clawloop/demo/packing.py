"""Lessons laid end to end in one row.

Knows nothing about what the lessons are about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoded:
    """One lesson as token ids.

    Args:
        replies: (begin, end) of what is to be learned, each with the end of its turn.
        weights: of each token of each reply.
    """

    tokens: Sequence[int]
    replies: Sequence[tuple[int, int]]
    weights: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Pack:
    """Lessons in one row.

    Args:
        tokens_S: what is read.
        rows_N, targets_N: where a reply's token is predicted, and which.
        weights_N: they add up to 1.
        lengths: tokens read of each lesson.
    """

    tokens_S: Tensor
    rows_N: Tensor
    targets_N: Tensor
    weights_N: Tensor
    lengths: tuple[int, ...]


def pack(lessons: Sequence[Encoded]) -> Pack:
    """All of these lessons in one row; the last token of each is predicted and never read."""
    tokens: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    lengths: list[int] = []
    for lesson in lessons:
        for (begin, end), of_reply in zip(lesson.replies, lesson.weights, strict=True):
            if len(of_reply) != end - begin:
                raise ValueError(f"a reply of {end - begin} tokens has {len(of_reply)} weights")
            rows += range(len(tokens) + begin - 1, len(tokens) + end - 1)
            targets += lesson.tokens[begin:end]
            weights += of_reply
        read = lesson.tokens[: lesson.replies[-1][1] - 1]
        tokens += read
        lengths.append(len(read))
    weights_N = torch.tensor(weights)
    return Pack(
        torch.tensor(tokens),
        torch.tensor(rows),
        torch.tensor(targets),
        weights_N / weights_N.sum(),
        tuple(lengths),
    )
