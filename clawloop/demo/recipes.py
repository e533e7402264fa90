"""What the demo learns by: one recipe for each method, the same but for the terms and the size of a batch.

Knows nothing about runs. The model is 200 times smaller than those the defaults are for, and steps are few, so
batches are small, the rate is high, and a batch that has hints is gone through twice. Where verdicts count they count
half, and the pull to the base model is strong. Once nearly all is right gradients are small, and an optimiser that had
forgotten the large ones by then would make full steps of what is left, which is noise; so it forgets slowly.

A verdict falls on every token of an answer, right content included. Seen over 400 interactions in one process: least
right content of `binary` 92 % and 88 % where batches were gone through twice (seed 1, beta2 0.98 and 0.999), and 100 %,
100 % and 98 % where once (seeds 1 to 3). `combined` had 98 % twice (seeds 1 and 2), but 75 % once (seed 6).
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
_KL = 0.2
_REMEMBERS = 0.999


def demo_recipe(method: Method) -> Recipe:
    """The recipe of a method; the combined one is also shown as deploy/recipes/demo.toml."""
    return Recipe(
        name="demo" if method is Method.COMBINED else f"demo_{method}",
        signal=_SIGNALS[method],
        train=Train(
            batch_samples=_BATCH_SAMPLES[method],
            advantage=_ADVANTAGES[method],
            loss=Loss(kl=_KL),
            lora=Lora(rank=8, alpha=16.0),
            optimiser=Optimiser(lr=4e-3, beta2=_REMEMBERS, epochs=_EPOCHS[method]),
        ),
    )
