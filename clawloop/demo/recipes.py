"""The demo's recipes, one for each method; they differ in the loss terms and in the pace of learning.

The model is 200 times smaller than those the defaults are for, and steps are few. So batches are small, the learning
rate is high, and a batch with hints gets two epochs. Verdicts weigh half, and the KL term is strong.

Once most answers are right, gradient norms fall to 0.001 to 0.01, from 0.01 to 0.04 during learning. AdamW with a
short memory of squared gradients would then scale this noise up to full steps, so beta2 is high. The noise has
outliers: one garbled answer with a negative verdict had a gradient 10 to 100 times that of its batch (norm 3) and left
63 % right content. So unlikely tokens are down-weighted for negative advantages, and gradients are clipped at the
norms usual during learning.

Hints are also distilled over top-k distributions, in the forward direction. Sampled tokens alone contain nothing of the
other style once the model is sure of one, and a flipped preference was not learned again within 96 interactions.
Distillation is fast, so two of three judge votes must give a hint: a judge of this size invents a wish in every
twentieth thanks.
"""

from __future__ import annotations

from enum import StrEnum

from clawloop.recipes.recipe import Advantage, Distillation, Lora, Loss, Optimiser, Recipe, Signal, Train


class Method(StrEnum):
    BINARY = "binary"  # verdicts reward the whole answer
    OPD = "opd"  # on-policy distillation: the hinted model teaches the model without the hint
    COMBINED = "combined"  # both


_SIGNALS = {
    Method.BINARY: Signal(hints=False),
    Method.OPD: Signal(verdicts=False, at_least_one=False, hints_needed=2),
    Method.COMBINED: Signal(hints_needed=2),
}
_VERDICT_WEIGHT = 0.5
_SPARE_UNLIKELY = 0.8
_ADVANTAGES = {
    # A negative verdict also lands on the tokens of right content.
    Method.BINARY: Advantage(verdict_weight=_VERDICT_WEIGHT, teacher_weight=0.0, spare_unlikely=1.0),
    Method.OPD: Advantage(verdict_weight=0.0, spare_unlikely=_SPARE_UNLIKELY),
    Method.COMBINED: Advantage(verdict_weight=_VERDICT_WEIGHT, spare_unlikely=_SPARE_UNLIKELY),
}
# Styles differ from one of their first tokens on; the teacher's top 8 ids at that position include both.
_TOP_K_DISTILLATION = Distillation(top_k=8, top_k_of="teacher", divergence="forward")
# Only some complaints contain a hint, and complaints become rare: with batches of eight, 64 interactions gave one batch
# of hints. With verdicts, batches of eight took twice as long to reach 90 %.
_BATCH_SAMPLES = 4
_EPOCHS = {Method.BINARY: 1, Method.OPD: 2, Method.COMBINED: 2}
_LEARNING_RATES = {Method.BINARY: 4e-3, Method.OPD: 3e-3, Method.COMBINED: 3e-3}
_LOSSES = {
    Method.BINARY: Loss(kl=0.2),
    Method.OPD: Loss(distillation=0.2, kl=0.2),
    Method.COMBINED: Loss(distillation=0.2, kl=0.15),
}
_BETA2 = 0.999
_GRAD_CLIPS = {Method.BINARY: 0.01, Method.OPD: 0.02, Method.COMBINED: 0.01}


def demo_recipe(method: Method) -> Recipe:
    """Return the recipe of a method; deploy/recipes/demo.toml is the combined one."""
    return Recipe(
        name="demo" if method is Method.COMBINED else f"demo_{method}",
        signal=_SIGNALS[method],
        train=Train(
            batch_samples=_BATCH_SAMPLES,
            advantage=_ADVANTAGES[method],
            distillation=Distillation() if method is Method.BINARY else _TOP_K_DISTILLATION,
            loss=_LOSSES[method],
            lora=Lora(rank=8, alpha=16.0),
            optimiser=Optimiser(
                lr=_LEARNING_RATES[method], beta2=_BETA2, grad_clip=_GRAD_CLIPS[method], epochs=_EPOCHS[method]
            ),
        ),
    )
