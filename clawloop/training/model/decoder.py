"""A Qwen3 or Qwen2.5 decoder with LoRA, composed from torchtune's modules.

Base weights and arithmetic are in `dtype`. Norm scales and LoRA weights are always float32: torch has a fused kernel
for float32 norms, and AdamW's small updates of LoRA vanish in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from clawloop.training.model.architecture import Architecture, adapter_names
from clawloop.training.model.layer import build_layer
from clawloop.training.model.lora import LoraShape
from clawloop.training.model.lora_linear import Float32LoraLinear, is_lora
from clawloop.training.model.token_scores import TokenScores, score_responses
from clawloop.training.model.torchtune_parts import Qwen2RotaryPositionalEmbeddings, RMSNorm
from clawloop.training.packing.collate import MicroBatch


class TorchtuneModel(nn.Module):
    """A decoder that takes micro-batches and computes scores at their response positions only.

    Satisfies `port.PolicyModel`. Built without weights (on `torch.device("meta")`); `torchtune_loading` fills it.

    Args:
        architecture: shape of the base model.
        lora: shape of the adapter.
        max_tokens: positions RoPE is computed for; no document may be longer.
        dtype: of base weights and arithmetic, float32 or bfloat16.
        gradient_checkpointing: keep only each layer's input for the backward pass and recompute the rest.
    """

    packs_documents = True

    def __init__(
        self,
        architecture: Architecture,
        lora: LoraShape,
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
                if isinstance(module, Qwen2RotaryPositionalEmbeddings):
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
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
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
        top_k: int | None = None,
    ) -> TokenScores:
        """See `port.PolicyModel`."""
        return score_responses(
            self.hidden_states(micro_batch),
            micro_batch,
            self.logits,
            self.vocab_size,
            entropies=entropies,
            at_ids_NK=at_ids_NK,
            top_k=top_k,
        )
