"""Scores of the response positions of a micro-batch, computed in chunks so that logits never take much memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from clawloop.algorithms.scoring import score
from clawloop.errors import StepDiverged


class TokenScores(NamedTuple):
    """Scores at the N response positions of a micro-batch; see `clawloop.algorithms.scoring.Scores`.

    A tuple, since FSDP finds an output's tensors in tuples only.

    Args:
        logprobs_N: float32[N], log-probs of the target tokens, in nats.
        entropies_N: float32[N]; None if not requested.
        topk_ids_NK: int64[N, K], the requested ids or the K most likely; None if not requested.
        topk_logprobs_NK: float32[N, K], log-probs at `topk_ids_NK`.
        tails_N: float32[N], log-probability of all other ids together.
    """

    logprobs_N: Tensor
    entropies_N: Tensor | None
    topk_ids_NK: Tensor | None
    topk_logprobs_NK: Tensor | None
    tails_N: Tensor | None


def score_positions(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, ids_NK: Tensor | None, entropies: bool
) -> TokenScores:
    """`score`, with NaN for all scores instead of StepDiverged."""
    try:
        scores = score(logits_NV, targets_N, temperature=temperature, topk_ids_TK=ids_NK, entropy=entropies)
    except StepDiverged:
        # Not raised inside the forward: under FSDP the other ranks are in the same forward and would wait for ever.
        # `Scores` raises the same error for these values.
        nan_N = logits_NV.sum(-1) * float("nan")
        nan_NK = None if ids_NK is None else nan_N[:, None].expand(ids_NK.shape)
        return TokenScores(nan_N, nan_N if entropies else None, ids_NK, nan_NK, None if ids_NK is None else nan_N)
    return TokenScores(scores.logprob_T, scores.entropy_T, ids_NK, scores.topk_logprobs_TK, scores.tail_T)


def chunk_positions(lengths: tuple[int, ...], chunk_size: int) -> list[list[tuple[int, int]]]:
    """Response positions in order, in chunks of at most `chunk_size`: lists of (document, number of positions)."""
    chunks: list[list[tuple[int, int]]] = [[]]
    free = chunk_size
    for document, length in enumerate(lengths):
        left = length
        while left:
            if free == 0:
                chunks.append([])
                free = chunk_size
            taken = min(left, free)
            chunks[-1].append((document, taken))
            left -= taken
            free -= taken
    return chunks


def concatenate(parts: list[TokenScores]) -> TokenScores:
    if len(parts) == 1:
        return parts[0]
    return TokenScores(
        torch.cat([part.logprobs_N for part in parts]),
        _concatenate_present([part.entropies_N for part in parts]),
        _concatenate_present([part.topk_ids_NK for part in parts]),
        _concatenate_present([part.topk_logprobs_NK for part in parts]),
        _concatenate_present([part.tails_N for part in parts]),
    )


def _concatenate_present(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
