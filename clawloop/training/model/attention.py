"""Causal attention along the branches of a micro-batch.

Knows nothing about layers or samples. No mask of S x S is made: each branch is attended by itself to its own
document's tokens and to no others, so the work is what the branches need, and a branch that shares nothing runs
the kernel a lone document runs. On CUDA all branches ask for flash attention, in float32 for the memory-efficient
one: what a branch may see is the lower right of a causal mask, which these kernels know by themselves. FlexAttention
would do them in one call; but torchtune compiles it anew for every number of tokens, and on a CPU, where every test
runs, it has no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from clawloop.training.packing.prefix_tree import Layout

# On a CPU the mask is made: one of 512 queries over a document of 32k tokens takes 64 MiB as numbers.
_QUERIES_AT_ONCE = 512


def attend_along_branches(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Layout, dropout_p: float, is_causal: bool
) -> Tensor:
    """Each token attends to itself and to what stands before it in its document.

    Args:
        q, k, v: [1, heads, S, head_dim].
        mask: what attends to what; called so because it comes through torchtune's attention as its mask.
        dropout_p: of the attention weights.
        is_causal: torchtune says False whenever a mask is given; documents are always causal.
    """
    del is_causal
    branches = torch.split(q, list(mask.lengths), dim=2)
    # Split and not sliced: a slice would get a gradient of the whole's size, mostly zeros.
    keys, values = torch.split(k, list(mask.segments), dim=2), torch.split(v, list(mask.segments), dim=2)
    attended = [
        _attend_joined(branch, [keys[index] for index in reads], [values[index] for index in reads], dropout_p)
        for branch, reads in zip(branches, mask.reads, strict=True)
    ]
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)


def _attend_joined(q: Tensor, keys: list[Tensor], values: list[Tensor], dropout_p: float) -> Tensor:
    if len(keys) == 1:
        return _attend(q, keys[0], values[0], dropout_p)
    # Kept for the backward pass, each branch's copy of all its document's keys would take more than the tokens read.
    attended: Tensor = checkpoint(
        lambda: _attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), dropout_p),
        use_reentrant=False,
        preserve_rng_state=dropout_p > 0,
    )
    return attended


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Q queries, the last of K keys' tokens."""
    queries, before = q.shape[2], k.shape[2] - q.shape[2]
    if before == 0:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    at_once = queries if q.is_cuda else _QUERIES_AT_ONCE
    parts = []
    for start in range(0, queries, at_once):
        part = q[:, :, start : start + at_once]
        seen = before + start + part.shape[2]
        allowed = causal_lower_right(part.shape[2], seen)
        parts.append(
            F.scaled_dot_product_attention(part, k[:, :, :seen], v[:, :, :seen], attn_mask=allowed, dropout_p=dropout_p)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
