"""What the demo learns by: one recipe for each method, the same but for the terms, the size of a batch and the pace.

Knows nothing about runs. The model is 200 times smaller than those the defaults are for, and steps are few, so
batches are small, the rate is high, and a batch that has hints is gone through twice. Where verdicts count they count
half, and the pull to the base model is strong.

Once nearly all is right gradients are small (norms of 0.001 to 0.01; 0.01 to 0.04 while it learns), and an optimiser
that had forgotten the large ones by then would make full steps of what is left, which is noise; so it forgets slowly.
What is left has outliers: one garbled answer that is blamed, token by token, has a gradient 10 to 100 times as large as
its batch, and took half of the right content with it (seen: norm 3, then 63 % right content). So gradients are cut at
what is ordinary while it learns.

`opd` stays the one a single late batch can harm: once nearly all is right, hints come with garbled answers and with
mistakes of the judge only (seen in the last of 10 steps: 83 % right content; 60 % uncut and at twice the rate). So it
is pulled back twice as hard: right content 97 to 100 % with four users, in one process.

A verdict falls on every token of an answer, right content included: `binary` goes through each batch once.
"""

from __future__ import annotations

from enum import StrEnum

from clawloop.recipe import Advantage, Lora, Loss, Optimiser, Recipe, Signal, Train


class Method(StrEnum):
    BINARY = "binary"  # the verdict rewards the whole answer
    OPD = "opd"  # the model that has read the hint teaches the one that has not
    COMBINED = "combined"  # both


_SIGNALS = {
    Method.BINARY: Signal(hints=False),
    Method.OPD: Signal(verdicts=False, at_least_one=False),
    Method.COMBINED: Signal(),
}
_VERDICT = 0.5
_ADVANTAGES = {
    Method.BINARY: Advantage(verdict_weight=_VERDICT, teacher_weight=0.0),
    Method.OPD: Advantage(verdict_weight=0.0),
    Method.COMBINED: Advantage(verdict_weight=_VERDICT),
}
# A user gives a hint only with some complaints, and the fewer the better it gets: of eight there was one batch in 64
# interactions.
_BATCH_SAMPLES = {Method.BINARY: 8, Method.OPD: 4, Method.COMBINED: 8}
_EPOCHS = {Method.BINARY: 1, Method.OPD: 2, Method.COMBINED: 2}
_RATES = {Method.BINARY: 4e-3, Method.OPD: 2e-3, Method.COMBINED: 3e-3}
_KL = {Method.BINARY: 0.2, Method.OPD: 0.4, Method.COMBINED: 0.2}
_REMEMBERS = 0.999
_CUT_AT = {Method.BINARY: 0.01, Method.OPD: 0.02, Method.COMBINED: 0.02}


def demo_recipe(method: Method) -> Recipe:
    """The recipe of a method; the combined one is also shown as deploy/recipes/demo.toml."""
    return Recipe(
        name="demo" if method is Method.COMBINED else f"demo_{method}",
        signal=_SIGNALS[method],
        train=Train(
            batch_samples=_BATCH_SAMPLES[method],
            advantage=_ADVANTAGES[method],
            loss=Loss(kl=_KL[method]),
            lora=Lora(rank=8, alpha=16.0),
            optimiser=Optimiser(lr=_RATES[method], beta2=_REMEMBERS, grad_clip=_CUT_AT[method], epochs=_EPOCHS[method]),
        ),
    )
