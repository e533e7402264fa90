"""Lessons laid end to end in one row, each attending to itself alone.

Knows nothing about what the lessons are about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Encoded:
    """One lesson as token ids.

    Args:
        replies: (begin, end) of what is to be learned, each with the end of its turn.
        weight: of each of its tokens.
    """

    tokens: Sequence[int]
    replies: Sequence[tuple[int, int]]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Pack:
    """Lessons in one row.

    Args:
        tokens_S: what is read.
        positions_S: they begin anew with each lesson.
        rows_N, targets_N: where a reply's token is predicted, and which.
        weights_N: they add up to 1.
        lengths: tokens read of each lesson.
    """

    tokens_S: Tensor
    positions_S: Tensor
    rows_N: Tensor
    targets_N: Tensor
    weights_N: Tensor
    lengths: tuple[int, ...]


def pack(lessons: Sequence[Encoded]) -> Pack:
    """All of these lessons in one row; the last token of each is predicted and never read."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    lengths: list[int] = []
    for lesson in lessons:
        for begin, end in lesson.replies:
            rows += range(len(tokens) + begin - 1, len(tokens) + end - 1)
            targets += lesson.tokens[begin:end]
            weights += [lesson.weight] * (end - begin)
        read = lesson.tokens[: lesson.replies[-1][1] - 1]
        tokens += read
        positions += range(len(read))
        lengths.append(len(read))
    weights_N = torch.tensor(weights)
    return Pack(
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(rows),
        torch.tensor(targets),
        weights_N / weights_N.sum(),
        tuple(lengths),
    )


def attend_within_lessons(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    lengths: tuple[int, ...],
    **unused: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each lesson, in the form transformers calls attention functions.

    Args:
        query, key, value: [1, heads, S, head_dim]; keys and values have fewer heads.
        lengths: as `Pack.lengths`.

    Returns:
        [1, S, heads, head_dim], and no attention weights.
    """
    del module, attention_mask, unused
    parts = zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    out = [F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True) for q, k, v in parts]
    return torch.cat(out, dim=2).transpose(1, 2), None
