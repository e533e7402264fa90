"""The linear layer that has LoRA, of torchtune's modules."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from clawloop.training.model.torchtune_parts import LoRALinear


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
