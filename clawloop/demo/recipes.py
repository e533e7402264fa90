"""What the demo learns by: one recipe for each method, the same but for the terms and the pace.

Knows nothing about runs. The model is 200 times smaller than those the defaults are for, and steps are few, so
batches are small, the rate is high, and a batch that has hints is gone through twice. Where verdicts count they count
half, and the pull to the base model is strong.

Once nearly all is right gradients are small (norms of 0.001 to 0.01; 0.01 to 0.04 while it learns), and an optimiser
that had forgotten the large ones by then would make full steps of what is left, which is noise; so it forgets slowly.
What is left has outliers: one garbled answer that is blamed, token by token, has a gradient 10 to 100 times as large as
its batch, and took half of the right content with it (seen: norm 3, then 63 % right content). So unlikely tokens are
spared from blame, and gradients are cut at what is ordinary while it learns.

A hint is taken up by whole distributions as well, in the forward direction: sampled tokens alone show a model that has
become sure of one style nothing of the other, and a taste that flips was not learned again within 96 interactions. It
is taken up fast, so two of three judges must have one: a judge of this size imagines a wish in every twentieth thanks.
"""

from __future__ import annotations

from enum import StrEnum

from clawloop.recipes.recipe import Advantage, Distillation, Lora, Loss, Optimiser, Recipe, Signal, Train


class Method(StrEnum):
    BINARY = "binary"  # the verdict rewards the whole answer
    OPD = "opd"  # the model that has read the hint teaches the one that has not
    COMBINED = "combined"  # both


_SIGNALS = {
    Method.BINARY: Signal(hints=False),
    Method.OPD: Signal(verdicts=False, at_least_one=False, hints_needed=2),
    Method.COMBINED: Signal(hints_needed=2),
}
_VERDICT = 0.5
_SPARED = 0.8
_ADVANTAGES = {
    # A verdict falls on every token of an answer, right content included.
    Method.BINARY: Advantage(verdict_weight=_VERDICT, teacher_weight=0.0, spare_unlikely=1.0),
    Method.OPD: Advantage(verdict_weight=0.0, spare_unlikely=_SPARED),
    Method.COMBINED: Advantage(verdict_weight=_VERDICT, spare_unlikely=_SPARED),
}
# The styles of a request differ from one of their first tokens on: there the teacher's eight likeliest ids hold both.
_BY_DISTRIBUTION = Distillation(top_k=8, top_k_of="teacher", divergence="forward")
# A user gives a hint only with some complaints, and the fewer the better it gets: of eight there was one batch in 64
# interactions. With verdicts, batches of eight took twice as long to 90 %.
_BATCH_SAMPLES = 4
_EPOCHS = {Method.BINARY: 1, Method.OPD: 2, Method.COMBINED: 2}
_RATES = {Method.BINARY: 4e-3, Method.OPD: 3e-3, Method.COMBINED: 3e-3}
_LOSSES = {
    Method.BINARY: Loss(kl=0.2),
    Method.OPD: Loss(distillation=0.2, kl=0.2),
    Method.COMBINED: Loss(distillation=0.2, kl=0.15),
}
_REMEMBERS = 0.999
_CUT_AT = {Method.BINARY: 0.01, Method.OPD: 0.02, Method.COMBINED: 0.01}


def demo_recipe(method: Method) -> Recipe:
    """The recipe of a method; the combined one is also shown as deploy/recipes/demo.toml."""
    return Recipe(
        name="demo" if method is Method.COMBINED else f"demo_{method}",
        signal=_SIGNALS[method],
        train=Train(
            batch_samples=_BATCH_SAMPLES,
            advantage=_ADVANTAGES[method],
            distillation=Distillation() if method is Method.BINARY else _BY_DISTRIBUTION,
            loss=_LOSSES[method],
            lora=Lora(rank=8, alpha=16.0),
            optimiser=Optimiser(lr=_RATES[method], beta2=_REMEMBERS, grad_clip=_CUT_AT[method], epochs=_EPOCHS[method]),
        ),
    )
