"""The shape of LoRA on a decoder's projections."""

from __future__ import annotations

from dataclasses import dataclass

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
