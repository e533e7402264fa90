"""The recipe of the tool-call demo.

The model is small and learns one thing, so batches are four groups, the learning rate is high, and a few odd replies
must not move it: gradients are clipped at the norm usual while it learns.
"""

from __future__ import annotations

from clawloop.recipes.recipe import Advantage, Lora, Loss, Optimiser, Recipe, Signal, Train

GROUP_SIZE = 8


def tool_call_recipe() -> Recipe:
    return Recipe(
        name="demo_tool_call",
        signal=Signal(hints=False),
        train=Train(
            batch_groups=4,
            advantage=Advantage(teacher_weight=0.0),
            loss=Loss(kl=0.02),
            lora=Lora(rank=8, alpha=16.0),
            optimiser=Optimiser(lr=3e-3, grad_clip=0.1),
        ),
    )
