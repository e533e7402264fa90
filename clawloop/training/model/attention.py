"""Causal attention along the branches of a micro-batch's prefix tree.

No S x S mask is built: one attention call per branch covers the tokens of its own document only, so no work is wasted,
and a branch that shares nothing runs the same kernel as a single document. On CUDA the calls use flash attention, in
float32 the memory-efficient kernel: a branch sees the lower right of a causal mask, which these kernels support.
FlexAttention could do all branches in one call, but torchtune recompiles it for every number of tokens, and on a CPU,
where every test runs, it has no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from clawloop.training.packing.prefix_tree import AttentionLayout

# On a CPU the mask is materialised: 512 queries over a document of 32k tokens take 64 MiB.
_CPU_QUERY_CHUNK = 512


def attend_along_branches(
    q: Tensor, k: Tensor, v: Tensor, *, mask: AttentionLayout, dropout_p: float, is_causal: bool
) -> Tensor:
    """Each token attends to itself and to the tokens before it in its document.

    Args:
        q, k, v: [1, heads, S, head_dim].
        mask: the micro-batch's layout; torchtune's attention passes it on under this name.
        dropout_p: of the attention weights.
        is_causal: ignored; torchtune passes False whenever a mask is given, but documents are always causal.

    Returns:
        [1, heads, S, head_dim].
    """
    del is_causal
    branches = torch.split(q, list(mask.lengths), dim=2)
    # Split and not sliced: a slice would have a gradient of the full size, mostly zeros.
    keys, values = torch.split(k, list(mask.segments), dim=2), torch.split(v, list(mask.segments), dim=2)
    attended = [
        _attend_joined(branch, [keys[index] for index in segments], [values[index] for index in segments], dropout_p)
        for branch, segments in zip(branches, mask.attends_to, strict=True)
    ]
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)


def _attend_joined(q: Tensor, keys: list[Tensor], values: list[Tensor], dropout_p: float) -> Tensor:
    if len(keys) == 1:
        return _attend(q, keys[0], values[0], dropout_p)
    # Recomputed in the backward pass: the copies of all keys of each branch's document would take too much memory.
    # The pieces are arguments: the layer's own checkpoint cannot release what a closure holds.
    attended: Tensor = checkpoint(
        _attend_pieces,
        dropout_p,
        q,
        *keys,
        *values,
        use_reentrant=False,
        preserve_rng_state=dropout_p > 0,
    )
    return attended


def _attend_pieces(dropout_p: float, q: Tensor, *pieces: Tensor) -> Tensor:
    """Attention over joined keys and values; `pieces` are first the keys, then as many values."""
    count = len(pieces) // 2
    keys: Tensor = _Joined.apply(*pieces[:count])  # type: ignore[no-untyped-call]
    values: Tensor = _Joined.apply(*pieces[count:])  # type: ignore[no-untyped-call]
    return _attend(q, keys, values, dropout_p)


class _Joined(torch.autograd.Function):
    """`torch.cat` along tokens; the pieces' gradients are copies, so that the gradient of the whole can be freed."""

    @staticmethod
    def forward(ctx: Any, *pieces: Tensor) -> Tensor:
        ctx.lengths = [piece.shape[2] for piece in pieces]
        return torch.cat(pieces, dim=2)

    @staticmethod
    def backward(ctx: Any, whole: Tensor) -> tuple[Tensor, ...]:
        # A view of the gradient of a branch's few tokens would hold that of its whole document until all branches end.
        return tuple(piece.clone() for piece in torch.split(whole, ctx.lengths, dim=2))


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Attention of [1, heads, Q, head_dim] queries, the last Q of the K tokens of k and v."""
    queries, before = q.shape[2], k.shape[2] - q.shape[2]
    if before == 0:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)
    chunk = queries if q.is_cuda else _CPU_QUERY_CHUNK
    parts = []
    for start in range(0, queries, chunk):
        part = q[:, :, start : start + chunk]
        seen = before + start + part.shape[2]
        allowed = causal_lower_right(part.shape[2], seen)
        parts.append(
            F.scaled_dot_product_attention(part, k[:, :, :seen], v[:, :, :seen], attn_mask=allowed, dropout_p=dropout_p)
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
