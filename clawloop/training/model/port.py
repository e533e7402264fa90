"""The port of a base model with a LoRA adapter, as a step uses it with either library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from clawloop.core.errors import AdapterUnusable
from clawloop.training.model.token_scores import Comparing, TokenScores
from clawloop.training.packing import MicroBatch

# LoRA -----------------------------------------------------------------------------------------------------------------
# The shape of LoRA on a decoder's projections.

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The seven projections of a layer that can have LoRA, by Hugging Face's names. Routed experts have none."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """Rank, scaling and targets of LoRA: a target's weight is W + (alpha / rank)·B·A."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = PROJECTIONS

    def __post_init__(self) -> None:
        if unknown := set(self.targets) - set(PROJECTIONS):
            raise ValueError(f"LoRA targets {sorted(unknown)} are none of {PROJECTIONS}")


# The model ------------------------------------------------------------------------------------------------------------
# The interface of a base model with a LoRA adapter that a step uses, the same for each library that computes it.
#
# The question is one: the log-probs (entropies, top-K) of given tokens at the response positions of a micro-batch,
# with the adapter or without it. Another version is another adapter set by `loading.set_adapter`; with or without
# gradient is the caller's `torch.no_grad`.


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
        comparing: Comparing | None = None,
    ) -> TokenScores:
        """Scores of the response tokens; logits are divided by each sample's own temperature.

        Args:
            micro_batch: on the model's device.
            entropies: also compute the entropy at each position.
            at_ids_NK: int64[N, K]; also compute the log-probs of these ids.
            comparing: also compare these documents, which have one reply; without gradient.
        """


# Its adapter ----------------------------------------------------------------------------------------------------------
# The adapter of a model in memory: set, reinitialised, read. By its tensors' names in a version's file.
#
# Under FSDP each rank keeps its own shard of every tensor.


def set_adapter(model: PolicyModel, tensors: Mapping[str, Tensor]) -> None:
    """Copies these unsharded tensors, by their names in its file, into the adapter.

    Raises:
        AdapterUnusable: names or shapes differ from those of this model's adapter.
    """
    parameters = model.adapter_parameters()
    if parameters.keys() != tensors.keys():
        different = sorted(parameters.keys() ^ tensors.keys())
        raise AdapterUnusable(f"{len(different)} tensors differ in name, the first is {different[0]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            tensor = tensors[name].to(parameter.device, torch.float32)
            if parameter.shape != tensor.shape:
                raise AdapterUnusable(f"{name}: {list(tensor.shape)} instead of {list(parameter.shape)}")
            parameter.copy_(shard_like(parameter, tensor))


def reset_adapter(model: PolicyModel, seed: int) -> None:
    """Reinitialises the adapter: A random, B zero, so that it changes nothing yet."""
    set_adapter(model, _fresh_adapter(model, seed))


def adapter_tensors(model: PolicyModel) -> dict[str, Tensor]:
    """Copies of the adapter's unsharded tensors by name, float32, on the CPU. Under FSDP a collective."""
    return {name: full_tensor(p.detach()).to("cpu", copy=True) for name, p in model.adapter_parameters().items()}


def full_tensor(tensor: Tensor) -> Tensor:
    """The unsharded tensor; under FSDP a collective."""
    from torch.distributed.tensor import DTensor  # 40 MB, which an idle trainer does without

    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full
    return tensor


def _fresh_adapter(model: PolicyModel, seed: int) -> dict[str, Tensor]:
    # On the CPU and sorted by name, so the same for every device and number of ranks.
    generator = torch.Generator().manual_seed(seed)
    fresh = {}
    for name, parameter in model.adapter_parameters().items():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])  # as in PEFT: Kaiming uniform with a = sqrt(5)
            fresh[name] = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        else:
            fresh[name] = torch.zeros(parameter.shape)
    return fresh


def shard_like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """This rank's shard of a full tensor, sharded as the parameter is; without FSDP the tensor itself."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor):
        return tensor
    # Every rank has read the full tensor, so no rank needs to receive its shard from rank 0.
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
