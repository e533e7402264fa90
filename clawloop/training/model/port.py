"""The interface of a base model with a LoRA adapter that a step uses, the same for each library that computes it.

The question is one: the log-probs (entropies, top-K) of given tokens at the response positions of a micro-batch, with
the adapter or without it. Another version is another adapter set by `loading.set_adapter`; with or without gradient is
the caller's `torch.no_grad`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from clawloop.training.model.lora import LoraShape
from clawloop.training.model.token_scores import TokenScores
from clawloop.training.packing.collate import MicroBatch


class PolicyModel(Protocol):
    """A base model, frozen, with one adapter, which is trained.

    Args:
        lora: shape of the adapter.
        max_tokens: longest document.
        packs_documents: whether a micro-batch may hold several documents, with shared prefixes computed once.
    """

    lora: LoraShape
    max_tokens: int
    packs_documents: bool

    @property
    def device(self) -> torch.device: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def is_sharded(self) -> bool:
        """True if each rank holds a share of each tensor (FSDP), not all of it."""

    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """The LoRA parameters by their names in a version's file, sorted by name."""

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within the block, the model is its base model."""

    def hidden_states(self, micro_batch: MicroBatch) -> Tensor:
        """[S, D]: hidden states after the final norm."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32[N, V]: logits of these hidden states before division by a temperature."""

    def __call__(
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
