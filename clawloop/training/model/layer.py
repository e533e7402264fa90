"""One decoder layer, composed from torchtune's modules, with LoRA on its target projections."""

from __future__ import annotations

from torch import Tensor, nn

from clawloop.training.model.architecture import Architecture
from clawloop.training.model.attention import attend_along_branches
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.lora_linear import Float32LoraLinear
from clawloop.training.model.torchtune_parts import (
    FeedForward,
    MultiHeadAttention,
    RMSNorm,
    TransformerSelfAttentionLayer,
)


class HeadNormProjection(nn.Module):
    """A projection followed by Qwen3's norm of each head.

    torchtune's own `q_norm=` is applied after RoPE, Qwen3's before. With scales of 1 both agree, since a rotation keeps
    the RMS; with trained scales they do not.
    """

    def __init__(self, proj: nn.Module, head_dim: int, eps: float):
        super().__init__()
        self.proj = proj
        self.norm = RMSNorm(head_dim, eps=eps)
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        heads: Tensor = self.norm(self.proj(x).unflatten(-1, (-1, self.head_dim)))
        return heads.flatten(-2)


def build_layer(
    architecture: Architecture, lora: LoraShape, rope: nn.Module, max_tokens: int
) -> TransformerSelfAttentionLayer:
    """A layer of this architecture; `rope` is shared by all layers."""
    width, inner = architecture.hidden_size, architecture.intermediate_size
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    head_dim, eps = architecture.head_dim, architecture.rms_norm_eps
    qkv_bias = architecture.model_type == "qwen2"

    def linear(name: str, size_in: int, size_out: int, bias: bool = False) -> nn.Module:
        if name not in lora.targets:
            return nn.Linear(size_in, size_out, bias=bias)
        made: nn.Module = Float32LoraLinear(size_in, size_out, rank=lora.rank, alpha=lora.alpha, use_bias=bias)
        return made

    def normed(projection: nn.Module) -> nn.Module:
        return HeadNormProjection(projection, head_dim, eps) if architecture.has_head_norm else projection

    attention = MultiHeadAttention(
        embed_dim=heads * head_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        q_proj=normed(linear("q_proj", width, heads * head_dim, qkv_bias)),
        k_proj=normed(linear("k_proj", width, kv_heads * head_dim, qkv_bias)),
        v_proj=linear("v_proj", width, kv_heads * head_dim, qkv_bias),
        output_proj=linear("o_proj", heads * head_dim, width),
        pos_embeddings=rope,
        max_seq_len=max_tokens,
    )
    # torchtune offers an S x S mask, or a compiled kernel for CUDA only; neither suits packed micro-batches on both
    # devices, so the attention call inside its module is replaced.
    attention._attention_call = attend_along_branches
    return TransformerSelfAttentionLayer(
        attn=attention,
        mlp=FeedForward(
            gate_proj=linear("gate_proj", width, inner),
            up_proj=linear("up_proj", width, inner),
            down_proj=linear("down_proj", inner, width),
        ),
        sa_norm=RMSNorm(width, eps=eps),
        mlp_norm=RMSNorm(width, eps=eps),
    )
