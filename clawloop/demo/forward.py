"""The forward pass the demo model is trained with: Qwen3's, for lessons laid end to end.

Knows nothing about lessons or losses. It gives what transformers' gives (a test compares them) in fewer passes over
memory, which is what a CPU spends its time on at this width: projections of one input are one product, a norm's scale
is part of the product after it, and norms and rotations keep no copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from transformers import Qwen3Config, Qwen3ForCausalLM


def last_states(model: Qwen3ForCausalLM, embedded_SH: Tensor, lengths: Sequence[int], rows_N: Tensor) -> Tensor:
    """The states from which tokens are predicted.

    Args:
        embedded_SH: embeddings of lessons, one after the other; each attends to itself alone.
        lengths: tokens of each lesson.
        rows_N: which states are wanted.

    Returns:
        [N, width], to be multiplied by the tokens' embeddings.
    """
    config = model.config
    cos_S1D, sin_S1D = _rotation(config, lengths)
    states_SH = embedded_SH
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        joint = torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight))
        normed_SH = _normed(states_SH, config.rms_norm_eps)
        projected = F.linear(normed_SH, joint * layer.input_layernorm.weight)
        heads = projected.view(len(projected), -1, config.head_dim)
        counts = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        query, key, value = torch.split(heads, counts, dim=1)
        query = _rotated(_normed(query, config.rms_norm_eps) * attention.q_norm.weight, cos_S1D, sin_S1D)
        key = _rotated(_normed(key, config.rms_norm_eps) * attention.k_norm.weight, cos_S1D, sin_S1D)
        seen = _attended(query, key, value, lengths).flatten(1)
        states_SH = states_SH + F.linear(seen, attention.o_proj.weight)
        both = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)) * layer.post_attention_layernorm.weight
        gate, up = F.linear(_normed(states_SH, config.rms_norm_eps), both).chunk(2, dim=1)
        states_SH = states_SH + F.linear(F.silu(gate) * up, mlp.down_proj.weight)
    found: Tensor = _normed(states_SH[rows_N], config.rms_norm_eps) * model.model.norm.weight
    return found


def _attended(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Causal attention inside each lesson; [S, heads, head_dim] each, keys and values have fewer heads."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    laid = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    parts = zip(*(torch.split(tensor, list(lengths), 2) for tensor in laid), strict=True)
    out = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts]
    return torch.cat(out, dim=2)[0].transpose(0, 1)


def _rotation(config: Qwen3Config, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions, which begin anew with each lesson: [S, 1, head_dim / 2]."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.cat([torch.arange(length, dtype=torch.float32) for length in lengths])
    angles = torch.outer(positions, config.rope_parameters["rope_theta"] ** -half)[:, None]
    return angles.cos(), angles.sin()


class _Normed(Function):
    """x / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed: Tensor = x * scale
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        normed, scale = ctx.saved_tensors
        along = (grad * normed).mean(-1, keepdim=True)
        return torch.addcmul(grad, normed, along, value=-1).mul_(scale), None


class _Rotated(Function):
    """Rotary position embedding: dimension i turns with dimension i + head_dim / 2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape)
    to_first, to_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=sign)
    return out


def _normed(x: Tensor, eps: float) -> Tensor:
    normed: Tensor = _Normed.apply(x, eps)  # type: ignore[no-untyped-call]
    return normed


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated: Tensor = _Rotated.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated
