"""Scores of the response positions of a micro-batch, computed in chunks so that logits never take much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clawloop.core.algorithms.scoring import Comparison, TopKOf, compare, score
from clawloop.core.errors import StepDiverged
from clawloop.training.packing import MicroBatch

# 64 Mi float32 logits are 256 MiB; those of a response of 8k tokens over a vocabulary of 152k would be 5 GiB.
_MAX_LOGITS = 2**26

Project: TypeAlias = Callable[[Tensor], Tensor]
"""Hidden states [N, D] → float32 logits [N, V]."""


class Compared(NamedTuple):
    """Indices of documents with the same response.

    Args:
        control: None: the teachers are compared without a control.
    """

    plain: int
    control: int | None
    hinted: tuple[int, ...]


class Comparing(NamedTuple):
    """Documents of a micro-batch to compare with each other.

    Args:
        top_k, of: see `clawloop.core.algorithms.scoring.compare`.
    """

    groups: tuple[Compared, ...]
    top_k: int
    of: TopKOf


class TokenScores(NamedTuple):
    """Scores at the N response positions of a micro-batch; see `clawloop.core.algorithms.scoring.Scores`.

    A tuple, since FSDP finds an output's tensors in tuples only.

    Args:
        logprobs_N: float32[N], log-probs of the target tokens, in nats.
        entropies_N: float32[N]; None if not requested.
        topk_logprobs_NK: float32[N, K], log-probs at the requested ids; None without any.
        tails_N: float32[N], log-probability of all other ids together.
        compared: one for each group that was requested.
    """

    logprobs_N: Tensor
    entropies_N: Tensor | None
    topk_logprobs_NK: Tensor | None
    tails_N: Tensor | None
    compared: tuple[Comparison, ...] = ()


def score_responses(
    hidden_SD: Tensor,
    micro_batch: MicroBatch,
    project: Project,
    vocab_size: int,
    *,
    entropies: bool,
    at_ids_NK: Tensor | None,
    comparing: Comparing | None,
) -> TokenScores:
    """Scores of a micro-batch's response tokens, from its hidden states; other arguments as in `port.PolicyModel`."""
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
        )
        if len(hidden_ND) > chunk_size and torch.is_grad_enabled():
            # Otherwise autograd would keep the logits of all chunks.
            chunks.append(checkpoint(_score_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            chunks.append(_score_chunk(*arguments))
    scores = concatenate(chunks)
    if comparing is None:
        return scores
    return scores._replace(compared=_compare_documents(hidden_SD, micro_batch, project, vocab_size, comparing))


def _compare_documents(
    hidden_SD: Tensor, micro_batch: MicroBatch, project: Project, vocab_size: int, comparing: Comparing
) -> tuple[Comparison, ...]:
    rows = torch.split(micro_batch.rows_N, list(micro_batch.response_lengths))
    compared = []
    for plain, control, hinted in comparing.groups:
        documents = (plain, *hinted) if control is None else (plain, control, *hinted)
        temperature = micro_batch.temperatures[plain]
        chunks = []
        in_chunks = (torch.split(rows[document], max(1, _MAX_LOGITS // vocab_size)) for document in documents)
        for chunk in zip(*in_chunks, strict=True):
            logits = map(project, (hidden_SD[places] for places in chunk))
            found = compare(
                logits, temperature=temperature, k=comparing.top_k, of=comparing.of, controlled=control is not None
            )
            chunks.append(found)
        compared.append(Comparison(*(torch.cat(column, dim=1) for column in zip(*chunks, strict=True))))
    return tuple(compared)


def _score_chunk(
    project: Project,
    hidden_ND: Tensor,
    targets_N: Tensor,
    ids_NK: Tensor | None,
    spans: list[tuple[int, float]],
    entropies: bool,
) -> TokenScores:
    # Each document is projected separately: a slice of joint logits would have a gradient of the joint size, mostly
    # zeros. Split and not sliced for the same reason.
    lengths = [length for length, _ in spans]
    hidden, targets = torch.split(hidden_ND, lengths), torch.split(targets_N, lengths)
    given = [None] * len(lengths) if ids_NK is None else torch.split(ids_NK, lengths)
    parts = []
    for (_, temperature), hidden_TD, targets_T, ids_TK in zip(spans, hidden, targets, given, strict=True):
        parts.append(score_positions(project(hidden_TD), targets_T, temperature, ids_TK, entropies))
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
        return TokenScores(nan_N, nan_N if entropies else None, nan_NK, None if ids_NK is None else nan_N)
    return TokenScores(scores.logprob_T, scores.entropy_T, scores.topk_logprobs_TK, scores.tail_T)


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
        _concatenate_present([part.topk_logprobs_NK for part in parts]),
        _concatenate_present([part.tails_N for part in parts]),
    )


def _concatenate_present(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
