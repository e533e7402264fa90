"""A Qwen3 or Qwen2.5 decoder with LoRA, composed from torchtune's modules.

The only module that knows torchtune. Knows nothing about samples, losses or files of ours. Base weights and
arithmetic are in `dtype`; norm scales and LoRA weights are always float32: norms because torch then has a fused
kernel for them, LoRA because AdamW's small updates vanish in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clawloop.algorithms.scoring import most_likely, score
from clawloop.errors import StepDiverged
from clawloop.training.model.architecture import PROJECTIONS, Architecture
from clawloop.training.model.attention import attend_along_branches
from clawloop.training.model.torchtune_parts import (
    FeedForward,
    LoRALinear,
    MultiHeadAttention,
    Qwen2RotaryPositionalEmbeddings,
    RMSNorm,
    TransformerSelfAttentionLayer,
)
from clawloop.training.packing.collate import Packed

# 64 Mi float32 logits are 256 MiB; a response of 8k tokens over a vocabulary of 152k would be 5 GiB at once.
_LOGITS_AT_ONCE = 2**26


@dataclass(frozen=True, slots=True)
class Lora:
    """Where LoRA goes and how large it is; the product B·A is scaled by alpha / rank."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        if unknown := set(self.targets) - set(PROJECTIONS):
            raise ValueError(f"LoRA targets {sorted(unknown)} are none of {PROJECTIONS}")


class TokenScores(NamedTuple):
    """What is read off the vocabulary at N response positions; see `clawloop.algorithms.scoring.Scores`.

    A tuple, since FSDP looks for an output's tensors in tuples only.

    Args:
        logprobs_N: of the target tokens.
        entropies_N: None if not asked for.
        topk_ids_NK: the ids asked for, or the K most likely; None if not asked for.
        topk_logprobs_NK, tails_N: at `topk_ids_NK`, and of all other ids together.
    """

    logprobs_N: Tensor
    entropies_N: Tensor | None
    topk_ids_NK: Tensor | None
    topk_logprobs_NK: Tensor | None
    tails_N: Tensor | None


class _Lora32(LoRALinear):  # type: ignore[misc]  # torchtune is untyped
    """LoRALinear whose A and B stay float32 and are cast for the arithmetic, as the engine does."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        out: Tensor = F.linear(flat, self.weight, self.bias)
        if not self.disabled:
            low = F.linear(flat, self.lora_a.weight.to(x.dtype))
            # Scaled and added by the matrix product itself: no further tensor of the output's size.
            out = out.addmm_(low, self.lora_b.weight.to(x.dtype).t(), alpha=self.alpha / self.rank)
        return out.view(*x.shape[:-1], -1)


class _HeadNormProjection(nn.Module):
    """A projection followed by Qwen3's norm of each head.

    torchtune's own `q_norm=` comes after RoPE, Qwen3's before. With fresh scales of 1 both agree, since a
    rotation keeps the RMS; with trained scales they do not.
    """

    def __init__(self, proj: nn.Module, head_dim: int, eps: float):
        super().__init__()
        self.proj = proj
        self.norm = RMSNorm(head_dim, eps=eps)
        self.head_dim = head_dim

    def forward(self, x: Tensor) -> Tensor:
        heads: Tensor = self.norm(self.proj(x).unflatten(-1, (-1, self.head_dim)))
        return heads.flatten(-2)


class PolicyModel(nn.Module):
    """A decoder that reads packed documents and answers at the requested positions only.

    Built without weights (`torch.device("meta")` saves making them); `clawloop.training.model.loading` fills it.

    Args:
        architecture: its shape.
        lora: where LoRA goes.
        max_tokens: positions RoPE is computed for; no document may be longer.
        dtype: of base weights and arithmetic, float32 or bfloat16.
        gradient_checkpointing: keep only each layer's input for the backward pass and compute the rest again.
    """

    def __init__(
        self,
        architecture: Architecture,
        lora: Lora,
        *,
        max_tokens: int,
        dtype: torch.dtype,
        gradient_checkpointing: bool,
    ):
        super().__init__()
        self.architecture = architecture
        self.lora = lora
        self.max_tokens = max_tokens
        self.dtype = dtype
        self.gradient_checkpointing = gradient_checkpointing
        width, vocab = architecture.hidden_size, architecture.vocab_size
        self.tok_embeddings = nn.Embedding(vocab, width)
        rope = Qwen2RotaryPositionalEmbeddings(
            dim=architecture.head_dim, max_seq_len=max_tokens, base=architecture.rope_theta
        )
        self.layers = nn.ModuleList(
            _layer(architecture, lora, rope, max_tokens) for _ in range(architecture.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps=architecture.rms_norm_eps)
        self.output = None if architecture.tie_word_embeddings else nn.Linear(width, vocab, bias=False)
        for name, parameter in self.named_parameters():
            parameter.data = parameter.data.to(self.parameter_dtype(name))
            parameter.requires_grad_(_is_adapter(name))

    @property
    def device(self) -> torch.device:
        return self.tok_embeddings.weight.device

    def parameter_dtype(self, name: str) -> torch.dtype:
        return torch.float32 if _is_adapter(name) or name.endswith("norm.scale") else self.dtype

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """The LoRA tensors by our name, in a fixed order."""
        return {name: p for name, p in sorted(self.named_parameters()) if _is_adapter(name)}

    def init_rope(self, device: torch.device) -> None:
        """Compute RoPE's table, in float32, on this device. Needed after building on `meta`."""
        with device:
            for module in self.modules():
                if isinstance(module, Qwen2RotaryPositionalEmbeddings):
                    module.rope_init()

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the model is its base model."""
        projections = [module for module in self.modules() if isinstance(module, _Lora32)]
        for projection in projections:
            projection.disabled = True
        try:
            yield
        finally:
            for projection in projections:
                projection.disabled = False

    def hidden_states(self, packed: Packed) -> Tensor:
        """Normed states of the last layer, [S, width], in `dtype`."""
        h: Tensor = self.tok_embeddings(packed.tokens_S[None])
        positions = packed.positions_S[None]
        again = self.gradient_checkpointing and torch.is_grad_enabled()
        for layer in self.layers:
            if again:
                # No RNG to keep: nothing here draws random numbers.
                h = checkpoint(
                    layer,
                    h,
                    mask=packed.layout,
                    input_pos=positions,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                h = layer(h, mask=packed.layout, input_pos=positions)
        normed: Tensor = self.norm(h)
        return normed[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 logits of these states, before any temperature: [N, V]."""
        weight = self.tok_embeddings.weight if self.output is None else self.output.weight
        return F.linear(hidden_ND, weight).float()

    def forward(
        self,
        packed: Packed,
        *,
        entropies: bool = False,
        at_ids_NK: Tensor | None = None,
        top_k: int | None = None,
    ) -> TokenScores:
        """Log-probs of the response tokens, of logits divided by each sample's own temperature.

        Args:
            packed: on the model's device.
            entropies: also the entropy at each position.
            at_ids_NK: also the log-probs of these ids.
            top_k: also the log-probs of the K most likely ids; not together with `at_ids_NK`.
        """
        if at_ids_NK is not None and top_k is not None:
            raise ValueError("ask for given ids or for the most likely ones, not both")
        hidden_ND = self.hidden_states(packed)[packed.rows_N]
        at_once = max(1, _LOGITS_AT_ONCE // self.architecture.vocab_size)
        chunks: list[TokenScores] = []
        start = 0
        for spans in _chunks(packed.response_lengths, at_once):
            rows = slice(start, start := start + sum(length for _, length in spans))
            divisors = [(length, packed.temperatures[document]) for document, length in spans]
            ids_NK = None if at_ids_NK is None else at_ids_NK[rows]
            arguments = (hidden_ND[rows], packed.targets_N[rows], ids_NK, divisors, entropies, top_k)
            if len(hidden_ND) > at_once and torch.is_grad_enabled():
                # Otherwise autograd would keep the logits of all chunks.
                chunks.append(checkpoint(self._read, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                chunks.append(self._read(*arguments))
        return _concatenated(chunks)

    def _read(
        self,
        hidden_ND: Tensor,
        targets_N: Tensor,
        ids_NK: Tensor | None,
        divisors: list[tuple[int, float]],
        entropies: bool,
        top_k: int | None,
    ) -> TokenScores:
        # Each document is projected by itself: slices of joint logits would get a gradient of the joint size
        # each, mostly zeros. Split and not sliced for the same reason.
        lengths = [length for length, _ in divisors]
        hidden, targets = torch.split(hidden_ND, lengths), torch.split(targets_N, lengths)
        given = [None] * len(lengths) if ids_NK is None else torch.split(ids_NK, lengths)
        readings = []
        for (_, temperature), hidden_TD, targets_T, ids_TK in zip(divisors, hidden, targets, given, strict=True):
            logits_TV = self.logits(hidden_TD)
            ids = most_likely(logits_TV, top_k) if top_k else ids_TK
            readings.append(_scored(logits_TV, targets_T, temperature, ids, entropies))
        return _concatenated(readings)


def _scored(
    logits_NV: Tensor, targets_N: Tensor, temperature: float, ids_NK: Tensor | None, entropies: bool
) -> TokenScores:
    try:
        scores = score(logits_NV, targets_N, temperature=temperature, topk_ids_TK=ids_NK, entropy=entropies)
    except StepDiverged:
        # Not raised in here: under FSDP the other ranks are inside the same forward and would wait for ever.
        # `Scores` made of this reading raises the same.
        nan_N = logits_NV.sum(-1) * float("nan")
        nan_NK = None if ids_NK is None else nan_N[:, None].expand(ids_NK.shape)
        return TokenScores(nan_N, nan_N if entropies else None, ids_NK, nan_NK, None if ids_NK is None else nan_N)
    return TokenScores(scores.logprob_T, scores.entropy_T, ids_NK, scores.topk_logprobs_TK, scores.tail_T)


def _chunks(lengths: tuple[int, ...], at_once: int) -> list[list[tuple[int, int]]]:
    """Response positions in their order, cut into chunks of `at_once`: (document, positions) pairs."""
    chunks: list[list[tuple[int, int]]] = [[]]
    room = at_once
    for document, length in enumerate(lengths):
        left = length
        while left:
            if room == 0:
                chunks.append([])
                room = at_once
            taken = min(left, room)
            chunks[-1].append((document, taken))
            left -= taken
            room -= taken
    return chunks


def _concatenated(readings: list[TokenScores]) -> TokenScores:
    if len(readings) == 1:
        return readings[0]
    return TokenScores(
        torch.cat([reading.logprobs_N for reading in readings]),
        _joined([reading.entropies_N for reading in readings]),
        _joined([reading.topk_ids_NK for reading in readings]),
        _joined([reading.topk_logprobs_NK for reading in readings]),
        _joined([reading.tails_N for reading in readings]),
    )


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def _is_adapter(name: str) -> bool:
    return ".lora_a." in name or ".lora_b." in name


def _layer(architecture: Architecture, lora: Lora, rope: nn.Module, max_tokens: int) -> TransformerSelfAttentionLayer:
    width, inner = architecture.hidden_size, architecture.intermediate_size
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    head_dim, eps = architecture.head_dim, architecture.rms_norm_eps
    qkv_bias = architecture.model_type == "qwen2"

    def linear(name: str, size_in: int, size_out: int, bias: bool = False) -> nn.Module:
        if name not in lora.targets:
            return nn.Linear(size_in, size_out, bias=bias)
        made: nn.Module = _Lora32(size_in, size_out, rank=lora.rank, alpha=lora.alpha, use_bias=bias)
        return made

    def normed(projection: nn.Module) -> nn.Module:
        return _HeadNormProjection(projection, head_dim, eps) if architecture.has_head_norm else projection

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
    # torchtune chooses between a mask of S x S and a compiled kernel for CUDA alone; neither suits packing
    # on both devices, so the call inside its module is replaced.
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
