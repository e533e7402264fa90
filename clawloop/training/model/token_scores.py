"""Scores of the response positions of a micro-batch, computed in chunks so that logits never take much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clawloop.core.algorithms.scoring import most_likely, score
from clawloop.core.errors import StepDiverged
from clawloop.training.packing import MicroBatch

# 64 Mi float32 logits are 256 MiB; those of a response of 8k tokens over a vocabulary of 152k would be 5 GiB.
_MAX_LOGITS = 2**26

Project: TypeAlias = Callable[[Tensor], Tensor]
"""Hidden states [N, D] → float32 logits [N, V]."""


class TokenScores(NamedTuple):
    """Scores at the N response positions of a micro-batch; see `clawloop.core.algorithms.scoring.Scores`.

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


def score_responses(
    hidden_SD: Tensor,
    micro_batch: MicroBatch,
    project: Project,
    vocab_size: int,
    *,
    entropies: bool,
    at_ids_NK: Tensor | None,
    top_k: int | None,
) -> TokenScores:
    """Scores of a micro-batch's response tokens, from its hidden states; other arguments as in `port.PolicyModel`."""
    if at_ids_NK is not None and top_k is not None:
        raise ValueError("pass at_ids_NK or top_k, not both")
    hidden_ND = hidden_SD[micro_batch.rows_N]
    chunk_size = max(1, _MAX_LOGITS // vocab_size)
    chunks: list[TokenScores] = []
    start = 0
    for spans in chunk_positions(micro_batch.response_lengths, chunk_size):
        rows = slice(start, start := start + sum(length for _, length in spans))
        spans_with_temperature = [(length, micro_batch.temperatures[document]) for document, length in spans]
        ids_NK = None if at_ids_NK is None else at_ids_NK[rows]
        arguments = (
            project,
            hidden_ND[rows],
            micro_batch.targets_N[rows],
            ids_NK,
            spans_with_temperature,
            entropies,
            top_k,
        )
        if len(hidden_ND) > chunk_size and torch.is_grad_enabled():
            # Otherwise autograd would keep the logits of all chunks.
            chunks.append(checkpoint(_score_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(_score_chunk(*arguments))
    return concatenate(chunks)


def _score_chunk(
    project: Project,
    hidden_ND: Tensor,
    targets_N: Tensor,
    ids_NK: Tensor | None,
    spans: list[tuple[int, float]],
    entropies: bool,
    top_k: int | None,
) -> TokenScores:
    # Each document is projected separately: a slice of joint logits would have a gradient of the joint size, mostly
    # zeros. Split and not sliced for the same reason.
    lengths = [length for length, _ in spans]
    hidden, targets = torch.split(hidden_ND, lengths), torch.split(targets_N, lengths)
    given = [None] * len(lengths) if ids_NK is None else torch.split(ids_NK, lengths)
    parts = []
    for (_, temperature), hidden_TD, targets_T, ids_TK in zip(spans, hidden, targets, given, strict=True):
        logits_TV = project(hidden_TD)
        ids = most_likely(logits_TV, top_k) if top_k else ids_TK
        parts.append(score_positions(logits_TV, targets_T, temperature, ids, entropies))
    return concatenate(parts)


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
