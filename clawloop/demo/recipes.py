"""The demo's recipes, one for each method: the structure of `combined`, `binary` and `opd` at the demo's pace.

The model is a thousand times smaller than those the defaults are for, its adapter has a lower rank, and a user is
watched for minutes: so batches are small and the learning rate is high. Nothing else differs from the default.

`spare_unlikely` keeps right content: one garbled answer, blamed token by token, has a gradient many times that of its
batch, because the gradient of log π grows as a token gets less likely. Without it a tuning user lost 7 % (with the
optimiser's beta2 at 0.999, 10 %) of the right content from 250 interactions on; so the default has it as well.
"""

from __future__ import annotations

from enum import StrEnum

from clawloop.recipes.gate import Gate
from clawloop.recipes.recipe import Advantage, Lora, Optimiser, Recipe, Signal, Train


class Method(StrEnum):
    BINARY = "binary"  # verdicts reward the whole answer
    OPD = "opd"  # on-policy distillation: the hinted model teaches the model without the hint
    COMBINED = "combined"  # both


_SIGNALS = {
    Method.BINARY: Signal(hints=False),
    Method.OPD: Signal(verdicts=False, at_least_one=False),
    Method.COMBINED: Signal(),
}
_SPARE_UNLIKELY = 1.0
_ADVANTAGES = {
    Method.BINARY: Advantage(teacher_weight=0.0, spare_unlikely=_SPARE_UNLIKELY),
    Method.OPD: Advantage(verdict_weight=0.0, spare_unlikely=_SPARE_UNLIKELY),
    Method.COMBINED: Advantage(spare_unlikely=_SPARE_UNLIKELY),
}
_BATCH_SAMPLES = 4
_LEARNING_RATE = 4e-3
_LORA = Lora(rank=8, alpha=16.0)
_HELD_OUT = 0.1


def demo_recipe(method: Method) -> Recipe:
    """Return the recipe of a method; deploy/recipes/demo.toml is the combined one."""
    return Recipe(
        name="demo" if method is Method.COMBINED else f"demo_{method}",
        signal=_SIGNALS[method],
        train=Train(
            batch_samples=_BATCH_SAMPLES,
            advantage=_ADVANTAGES[method],
            lora=_LORA,
            optimiser=Optimiser(lr=_LEARNING_RATE),
        ),
        # Without verdicts there is nothing to compare held-out turns by.
        gate=Gate() if method is Method.OPD else Gate(held_out=_HELD_OUT),
    )
