"""A base model with 4-bit weights (NF4, QLoRA, arXiv 2305.14314), by torchao, on a CPU or a GPU.

Only the projections that adapters are put on are quantised, and each is computed in the dtype it was loaded in. The
quantised model is another model than the engine's, so a step's ratio has to be decoupled from the engine's log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import to_nf4

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
