"""Packs tokenized lessons into one row for a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Encoded:
    """One tokenized lesson.

    Args:
        replies: (begin, end) of each reply to learn, with its end-of-turn token.
        weights: loss weight of each token of each reply.
    """

    tokens: Sequence[int]
    replies: Sequence[tuple[int, int]]
    weights: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Pack:
    """Packed lessons.

    Args:
        tokens_S: input tokens.
        rows_N, targets_N: the positions that predict reply tokens, and those tokens.
        weights_N: loss weights; they sum to 1.
        lengths: input tokens of each lesson.
    """

    tokens_S: Tensor
    rows_N: Tensor
    targets_N: Tensor
    weights_N: Tensor
    lengths: tuple[int, ...]


def pack(lessons: Sequence[Encoded]) -> Pack:
    """Pack lessons into one row, each without its last token, which is only a target."""
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
