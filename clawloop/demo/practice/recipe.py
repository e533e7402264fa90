"""The recipe of the demos that learn from episodes.

The models are small and learn one thing, so batches are a few groups, the learning rate is high, and a few odd replies
must not move it: gradients are clipped at the norm usual while they learn.
"""

from __future__ import annotations

from clawloop.recipes.recipe import Advantage, Lora, Loss, Optimiser, Recipe, Signal, Train

GROUP_SIZE = 8


def practice_recipe(name: str, batch_groups: int) -> Recipe:
    return Recipe(
        name=name,
        signal=Signal(hints=False),
        train=Train(
            batch_groups=batch_groups,
            advantage=Advantage(teacher_weight=0.0),
            loss=Loss(kl=0.02),
            lora=Lora(rank=8, alpha=16.0),
            optimiser=Optimiser(lr=3e-3, grad_clip=0.1),
            # Versions that were not measured while newer ones came are measured after the run.
            kept_versions=100,
        ),
    )
