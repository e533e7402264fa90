"""Decoders of Qwen3, Qwen2.5, Llama and Mistral with LoRA, of torchtune's modules, and filled from a checkpoint."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from torchao.dtypes.nf4tensor import to_nf4

from clawloop.core.errors import ModelUnsupported
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.checkpoint import (
    Architecture,
    Llama3Rope,
    adapter_names,
    base_names,
    read_architecture,
)
from clawloop.training.model.port import LoraShape, reset_adapter, shard_like
from clawloop.training.model.token_scores import Comparing, TokenScores, score_responses
from clawloop.training.options import Quantisation
from clawloop.training.packing import AttentionLayout, MicroBatch

# Modules of torchtune -------------------------------------------------------------------------------------------------
# The modules we use of torchtune (no longer developed, hence pinned), imported without its data sets.
#
# On import torchtune loads Hugging Face's `datasets`, and with it pandas and pyarrow, for its own recipes: 2 s of
# every trainer's start and 90 MB in every rank (measured), for two functions that none of these modules call.

_UNUSED = {"datasets": ["load_dataset"], "datasets.distributed": ["split_dataset_by_node"]}


@contextmanager
def _stand_ins(unused: dict[str, list[str]]) -> Iterator[None]:
    """Within the block, these modules are empty stand-ins; a later import gets the real module."""
    missing = {name: functions for name, functions in unused.items() if name not in sys.modules}
    for name, functions in missing.items():
        module = ModuleType(name)
        module.__path__ = []
        for function in functions:
            setattr(module, function, None)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


with _stand_ins(_UNUSED):
    from torchtune.models.qwen2 import Qwen2RotaryPositionalEmbeddings
    from torchtune.modules import FeedForward, MultiHeadAttention, RMSNorm, TransformerSelfAttentionLayer
    from torchtune.modules.peft import LoRALinear

__all__ = [
    "FeedForward",
    "LoRALinear",
    "MultiHeadAttention",
    "Qwen2RotaryPositionalEmbeddings",
    "RMSNorm",
    "TransformerSelfAttentionLayer",
]


# LoRA -----------------------------------------------------------------------------------------------------------------
# The linear layer that has LoRA, of torchtune's modules.


class Float32LoraLinear(LoRALinear):  # type: ignore[misc]  # torchtune is untyped
    """LoRALinear with float32 A and B, cast to the input's dtype for the arithmetic, as the engine does."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        out: Tensor = F.linear(flat, self.weight, self.bias)
        if not self.disabled:
            low = F.linear(flat, self.lora_a.weight.to(x.dtype))
            # The matrix product scales and adds in place: no second tensor of the output's size.
            out = out.addmm_(low, self.lora_b.weight.to(x.dtype).t(), alpha=self.alpha / self.rank)
        return out.view(*x.shape[:-1], -1)


def is_lora(parameter: str) -> bool:
    """True if a parameter of this name is a LoRA matrix."""
    return ".lora_a." in parameter or ".lora_b." in parameter


# 4-bit weights --------------------------------------------------------------------------------------------------------
# A base model with 4-bit weights (NF4, QLoRA, arXiv 2305.14314), by torchao, on a CPU or a GPU.
#
# Only the projections that adapters are put on are quantised, and each is computed in the dtype it was loaded in. The
# quantised model is another model than the engine's, so a step's ratio has to be decoupled from the engine's log-
# probs.

_BLOCK = 64
# Scales are quantised too, at most so many blocks at once.
_SCALER_BLOCK = 256


def quantise(projections: Iterable[nn.Module], device: torch.device) -> None:
    """Replaces the weight of each of these modules by a 4-bit one on this device, one after another: the device never
    holds all of them whole."""
    for module in projections:
        weight = quantised(module.get_parameter("weight").detach().to(device))
        module.weight = nn.Parameter(weight, requires_grad=False)


def quantised(weight: Tensor) -> Tensor:
    """The weight in 4 bits; a weight whose size is no multiple of a block stays as it is."""
    if weight.numel() % _BLOCK != 0:
        return weight
    found: Tensor = to_nf4(weight, _BLOCK, math.gcd(weight.numel() // _BLOCK, _SCALER_BLOCK))
    return found


# Attention ------------------------------------------------------------------------------------------------------------
# Causal attention along the branches of a micro-batch's prefix tree.
#
# No S x S mask is built: one attention call per branch covers the tokens of its own document only, so no work is
# wasted, and a branch that shares nothing runs the same kernel as a single document. On CUDA the calls use flash
# attention, in float32 the memory-efficient kernel: a branch sees the lower right of a causal mask, which these
# kernels support. FlexAttention could do all branches in one call, but torchtune recompiles it for every number of
# tokens, and on a CPU, where every test runs, it has no gradient.

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


# Layers ---------------------------------------------------------------------------------------------------------------
# One decoder layer, composed from torchtune's modules, with LoRA on its target projections.


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


class Rope(Qwen2RotaryPositionalEmbeddings):  # type: ignore[misc]  # torchtune is untyped
    """RoPE of an architecture, a feature rotated with the one half a head away, for so many positions."""

    theta: Tensor

    def __init__(self, architecture: Architecture, max_tokens: int):
        self._scaling = architecture.llama3_rope
        super().__init__(dim=architecture.head_dim, max_seq_len=max_tokens, base=architecture.rope_theta)

    def rope_init(self) -> None:
        super().rope_init()
        if self._scaling is not None:
            self.theta = llama3_frequencies(self.theta, self._scaling)
            self.build_rope_cache(self.max_seq_len)


def llama3_frequencies(theta: Tensor, scaling: Llama3Rope) -> Tensor:
    """Slower frequencies for a longer context (Llama 3.1, arXiv 2407.21783; the formula is that of Meta's release).

    Waves that turn often in the original context stay, those that turn less than once are `factor` times as long, and
    between them the factor is interpolated.
    """
    turns = theta * scaling.original_max_position_embeddings / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return theta * (kept + (1 - kept) / scaling.factor)


def build_layer(
    architecture: Architecture, lora: LoraShape, rope: nn.Module, max_tokens: int
) -> TransformerSelfAttentionLayer:
    """A layer of this architecture; `rope` is shared by all layers."""
    width, inner = architecture.hidden_size, architecture.intermediate_size
    heads, kv_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    head_dim, eps = architecture.head_dim, architecture.rms_norm_eps
    qkv_bias = architecture.has_qkv_bias

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


# The decoder ----------------------------------------------------------------------------------------------------------
# A decoder with LoRA, composed from torchtune's modules.
#
# Base weights and arithmetic are in `dtype`. Norm scales and LoRA weights are always float32: torch has a fused kernel
# for float32 norms, and AdamW's small updates of LoRA vanish in bfloat16.


class TorchtuneModel(nn.Module):
    """A decoder that takes micro-batches and computes scores at their response positions only.

    Satisfies `port.PolicyModel`. Built without weights (on `torch.device("meta")`); `torchtune_loading` fills it.

    Args:
        architecture: shape of the base model.
        lora: shape of the adapter.
        max_tokens: positions RoPE is computed for; no document may be longer.
        dtype: of base weights and arithmetic, float32 or bfloat16.
        recompute_beyond: tokens of a micro-batch beyond which only each layer's input is kept for the backward pass,
            and the rest computed again; None: never.
    """

    packs_documents = True

    def __init__(
        self,
        architecture: Architecture,
        lora: LoraShape,
        *,
        max_tokens: int,
        dtype: torch.dtype,
        recompute_beyond: int | None,
    ):
        super().__init__()
        self.architecture = architecture
        self.lora = lora
        self.max_tokens = max_tokens
        self.dtype = dtype
        self.recompute_beyond = recompute_beyond
        width, vocab = architecture.hidden_size, architecture.vocab_size
        self.tok_embeddings = nn.Embedding(vocab, width)
        rope = Rope(architecture, max_tokens)
        self.layers = nn.ModuleList(
            build_layer(architecture, lora, rope, max_tokens) for _ in range(architecture.num_hidden_layers)
        )
        self.norm = RMSNorm(width, eps=architecture.rms_norm_eps)
        self.output = None if architecture.tie_word_embeddings else nn.Linear(width, vocab, bias=False)
        for name, parameter in self.named_parameters():
            parameter.data = parameter.data.to(self.parameter_dtype(name))
            parameter.requires_grad_(is_lora(name))

    @property
    def device(self) -> torch.device:
        return self.tok_embeddings.weight.device

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds a share of each tensor (FSDP), not all of it."""
        return isinstance(self, FSDPModule)  # not by its tensors, which are whole between forward and backward

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size

    def parameter_dtype(self, name: str) -> torch.dtype:
        return torch.float32 if is_lora(name) or name.endswith("norm.scale") else self.dtype

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """See `port.PolicyModel`."""
        parameters = dict(self.named_parameters())
        names = adapter_names(self.architecture, self.lora.targets)
        return {theirs: parameters[ours] for ours, theirs in sorted(names.items(), key=itemgetter(1))}

    def init_rope(self, device: torch.device) -> None:
        """Computes RoPE's table, in float32, on this device. Needed after building on `meta`."""
        with device:
            for module in self.modules():
                if isinstance(module, Rope):
                    module.rope_init()

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Within the block, the model is its base model."""
        projections = [module for module in self.modules() if isinstance(module, Float32LoraLinear)]
        for projection in projections:
            projection.disabled = True
        try:
            yield
        finally:
            for projection in projections:
                projection.disabled = False

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """Hidden states after the final norm: [S, D] in `dtype`, D = `hidden_size`."""
        h: Tensor = self.tok_embeddings(micro_batch.tokens_S[None])
        positions = micro_batch.positions_S[None]
        kept = self.recompute_beyond
        recompute = kept is not None and len(micro_batch.tokens_S) > kept and torch.is_grad_enabled()
        for layer in self.layers:
            if recompute:
                # No RNG state to keep: a layer draws no random numbers.
                h = checkpoint(
                    layer,
                    h,
                    mask=micro_batch.layout,
                    input_pos=positions,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            else:
                h = layer(h, mask=micro_batch.layout, input_pos=positions)
        normed: Tensor = self.norm(h)
        return normed[0]

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32[N, V], logits of these hidden states before division by a temperature."""
        weight = self.tok_embeddings.weight if self.output is None else self.output.weight
        return F.linear(hidden_ND, weight).float()

    def forward(
        self,
        micro_batch: MicroBatch,
        *,
        entropies: bool = False,
        at_ids_NK: Tensor | None = None,
        comparing: Comparing | None = None,
    ) -> TokenScores:
        """See `port.PolicyModel`."""
        return score_responses(
            self.hidden_states(micro_batch),
            micro_batch,
            self.logits,
            self.vocab_size,
            entropies=entropies,
            at_ids_NK=at_ids_NK,
            comparing=comparing,
        )


# Loading --------------------------------------------------------------------------------------------------------------
# Builds torchtune's decoder and fills it from a checkpoint.
#
# Under FSDP each rank keeps its own shard of every tensor.


def build_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    recompute_beyond: int | None = 0,
) -> TorchtuneModel:
    """The model that this checkpoint describes, without weights (on `meta`), to be sharded and filled.

    Args:
        checkpoint: Hugging Face directory.
        lora: shape of the adapter.
        dtype: float32 or bfloat16.
        max_tokens: longest document; None: all positions of the checkpoint.
        recompute_beyond: see `TorchtuneModel`.

    Raises:
        ModelUnsupported: an architecture or feature that the trainer does not support.
    """
    architecture = read_architecture(checkpoint, max_tokens)
    positions = architecture.max_position_embeddings
    with torch.device("meta"):
        return TorchtuneModel(
            architecture,
            lora,
            max_tokens=positions if max_tokens is None else min(max_tokens, positions),
            dtype=dtype,
            recompute_beyond=recompute_beyond,
        )


def fill_model(
    model: TorchtuneModel,
    checkpoint: Path,
    device: torch.device,
    *,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> None:
    """Reads the base weights and initialises a fresh adapter: A random, B zero, so that it changes nothing yet.

    Args:
        quantisation: of each projection as it is read, so that they are never all there whole.

    Raises:
        ModelUnsupported: tensors are missing, or their shapes disagree with the config.
    """
    ours_of = {theirs: ours for ours, theirs in base_names(model.architecture).items()}
    projections = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Float32LoraLinear)}
    filled: dict[str, Tensor] = {}
    # One tensor at a time: under FSDP the whole model may not fit on one rank.
    for theirs, tensor in BaseWeights(checkpoint).read(ours_of, device):
        ours = ours_of[theirs]
        cast = tensor.to(model.parameter_dtype(ours))
        shard = _checked_shard(model.get_parameter(ours), cast, f"{checkpoint}: {ours}")
        filled[ours] = quantised(shard) if quantisation is not None and ours in projections else shard
    for ours, parameter in model.named_parameters():
        if is_lora(ours):
            filled[ours] = shard_like(parameter, torch.zeros(parameter.shape, device=device))
    model.load_state_dict(filled, strict=True, assign=True)
    for ours, parameter in model.named_parameters():
        parameter.requires_grad_(is_lora(ours))  # `assign` made new parameters
    reset_adapter(model, seed)
    model.init_rope(device)


def load_torchtune_model(
    checkpoint: Path,
    lora: LoraShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_tokens: int | None = None,
    recompute_beyond: int | None = 0,
    quantisation: Quantisation | None = None,
    seed: int = 0,
) -> TorchtuneModel:
    """`build_model` and `fill_model`, for one process."""
    model = build_model(
        checkpoint,
        lora,
        dtype=dtype,
        max_tokens=max_tokens,
        recompute_beyond=recompute_beyond,
    )
    fill_model(model, checkpoint, device, quantisation=quantisation, seed=seed)
    return model


def _checked_shard(parameter: Tensor, tensor: Tensor, what: str) -> Tensor:
    if parameter.shape != tensor.shape:
        raise ModelUnsupported(f"{what} is {list(tensor.shape)}, the config says {list(parameter.shape)}")
    return shard_like(parameter, tensor)
