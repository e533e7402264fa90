"""A Qwen3 or Qwen2.5 decoder with LoRA, composed from torchtune's modules.

Base weights and arithmetic are in `dtype`. Norm scales and LoRA weights are always float32: torch has a fused kernel
for float32 norms, and AdamW's small updates of LoRA vanish in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from clawloop.algorithms.scoring import most_likely
from clawloop.training.model.architecture import Architecture
from clawloop.training.model.layer import build_layer
from clawloop.training.model.lora import Float32LoraLinear, LoraShape, is_lora
from clawloop.training.model.token_scores import TokenScores, chunk_positions, concatenate, score_positions
from clawloop.training.model.torchtune_parts import Qwen2RotaryPositionalEmbeddings, RMSNorm
from clawloop.training.packing.collate import MicroBatch

# 64 Mi float32 logits are 256 MiB; those of a response of 8k tokens over a vocabulary of 152k would be 5 GiB.
_MAX_LOGITS = 2**26


class PolicyModel(nn.Module):
    """A decoder that takes micro-batches and computes scores at their response positions only.

    Built without weights (on `torch.device("meta")`); `clawloop.training.model.loading` fills it.

    Args:
        architecture: shape of the base model.
        lora: shape of the adapter.
        max_tokens: positions RoPE is computed for; no document may be longer.
        dtype: of base weights and arithmetic, float32 or bfloat16.
        gradient_checkpointing: keep only each layer's input for the backward pass and recompute the rest.
    """

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
        """Whether ranks hold a share of each tensor (FSDP), not all of it."""
        return isinstance(self, FSDPModule)  # not by its tensors, which are whole between forward and backward

    def parameter_dtype(self, name: str) -> torch.dtype:
        return torch.float32 if is_lora(name) or name.endswith("norm.scale") else self.dtype

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """The LoRA parameters by our name, sorted by name."""
        return {name: p for name, p in sorted(self.named_parameters()) if is_lora(name)}

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
        """Scores of the response tokens; logits are divided by each sample's own temperature.

        Args:
            micro_batch: on the model's device.
            entropies: also compute the entropy at each position.
            at_ids_NK: int64[N, K]; also compute the log-probs of these ids.
            top_k: also compute the log-probs of the K most likely ids; not together with `at_ids_NK`.
        """
        if at_ids_NK is not None and top_k is not None:
            raise ValueError("pass at_ids_NK or top_k, not both")
        hidden_ND = self.hidden_states(micro_batch)[micro_batch.rows_N]
        chunk_size = max(1, _MAX_LOGITS // self.architecture.vocab_size)
        chunks: list[TokenScores] = []
        start = 0
        for spans in chunk_positions(micro_batch.response_lengths, chunk_size):
            rows = slice(start, start := start + sum(length for _, length in spans))
            spans_with_temperature = [(length, micro_batch.temperatures[document]) for document, length in spans]
            ids_NK = None if at_ids_NK is None else at_ids_NK[rows]
            arguments = (hidden_ND[rows], micro_batch.targets_N[rows], ids_NK, spans_with_temperature, entropies, top_k)
            if len(hidden_ND) > chunk_size and torch.is_grad_enabled():
                # Otherwise autograd would keep the logits of all chunks.
                chunks.append(checkpoint(self._score_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
            else:
                chunks.append(self._score_chunk(*arguments))
        return concatenate(chunks)

    def _score_chunk(
        self,
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
            logits_TV = self.logits(hidden_TD)
            ids = most_likely(logits_TV, top_k) if top_k else ids_TK
            parts.append(score_positions(logits_TV, targets_T, temperature, ids, entropies))
        return concatenate(parts)
