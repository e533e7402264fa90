"""The demo's recipes, one for each method: the structure of the shipped ones at the demo's pace.

The model is a thousand times smaller than those the defaults are for, its adapter has a lower rank, and a user is
watched for minutes: so batches are small and the learning rate is high. Of what a version may lose before the gate
rejects it the demo allows less, and asks no general questions. `demo.toml` differs from `combined` in nothing else;
`hybrid` has here the pull and the epsilon of the others.

`spare_unlikely` keeps right content: one garbled answer, blamed token by token, has a gradient many times that of its
batch, because the gradient of log π grows as a token gets less likely. Without it a tuning user lost 7 % (with the
optimiser's beta2 at 0.999, 10 %) of the right content from 250 interactions on; so `combined`, `hybrid` and
`hindsight` have it as well.

So have they a lower `beta1` and `grad_clip`, and `combined` a stronger pull to the base model: momentum went on past
what the replies asked for, after quiet steps one gradient of fifty times their size moved the policy for several more,
and what was lost came back slowly. docs/results.md has the ablation.
"""

from __future__ import annotations

from enum import StrEnum

from clawloop.core.recipes.gate import Gate
from clawloop.core.recipes.recipe import (
    WITHOUT_JUDGE,
    Advantage,
    Distillation,
    Lora,
    Loss,
    Optimiser,
    Recipe,
    Signal,
    Train,
)


class Method(StrEnum):
    BINARY = "binary"  # verdicts reward the whole answer
    OPD = "opd"  # on-policy distillation: the hinted model teaches the model without the hint
    COMBINED = "combined"  # both, with the longest hint at the sampled tokens
    HYBRID = "hybrid"  # both, with the hint of the largest overlap over the likeliest tokens
    HINDSIGHT = "hindsight"  # the user's next message teaches, and thumbs reward: no judge


_SIGNALS = {
    Method.BINARY: Signal(hints=False),
    Method.OPD: Signal(verdicts=False, at_least_one=False),
    Method.COMBINED: Signal(),
    Method.HYBRID: Signal(),
}
_SPARE_UNLIKELY = 1.0
_ADVANTAGES = {
    Method.BINARY: Advantage(teacher_weight=0.0, spare_unlikely=_SPARE_UNLIKELY),
    Method.OPD: Advantage(verdict_weight=0.0, spare_unlikely=_SPARE_UNLIKELY),
    Method.COMBINED: Advantage(spare_unlikely=_SPARE_UNLIKELY),
    Method.HYBRID: Advantage(
        verdict_weight=0.1, teacher_weight=0.0, opd_clip=1.0, control=True, spare_unlikely=_SPARE_UNLIKELY
    ),
}
_DISTILLATION = Distillation(top_k=4, divergence="clipped")
_BATCH_SAMPLES = 4
_LEARNING_RATE = 4e-3
_LORA = Lora(rank=8, alpha=16.0)
# The values of `combined`; docs/results.md tells their effect.
_BETA1 = 0.5
_GRAD_CLIP = 0.05
_KL = 0.1
_HELD_OUT = 0.1
# Stricter than the default: without learning the toy answers all of its 120 probes rightly, so none differs by chance.
_CONTENT_LOSS = 0.01
# With 0.5 three steps in a row were rejected with a user, and training paused.
_LR_BACKOFF = 0.25


def demo_recipe(method: Method) -> Recipe:
    """Return the recipe of a method; deploy/recipes/demo.toml is the combined one."""
    if method is Method.HINDSIGHT:
        return _model_recipe()
    return Recipe(
        name="demo" if method is Method.COMBINED else f"demo_{method}",
        signal=_SIGNALS[method],
        train=Train(
            batch_samples=_BATCH_SAMPLES,
            advantage=_ADVANTAGES[method],
            distillation=_DISTILLATION if method is Method.HYBRID else Distillation(),
            loss=Loss(kl=_KL, distillation=1.0 if method is Method.HYBRID else 0.0),
            lora=_LORA,
            optimiser=Optimiser(lr=_LEARNING_RATE, beta1=_BETA1, grad_clip=_GRAD_CLIP),
        ),
        # Without verdicts there is nothing to compare held-out turns by.
        gate=Gate(
            held_out=0.0 if method is Method.OPD else _HELD_OUT,
            general_probes=False,  # the toy knows its own world only
            content_loss=_CONTENT_LOSS,
            lr_backoff=_LR_BACKOFF,
        ),
    )


_MODEL_CONTENT_LOSS = 0.1  # the bar is 90 % of what the base model knows


def _model_recipe() -> Recipe:
    """The recipe of a pretrained model: deploy/recipes/hindsight.toml with this demo's gate."""
    gate = Gate(content_loss=_MODEL_CONTENT_LOSS, lr_backoff=_LR_BACKOFF)
    return WITHOUT_JUDGE.model_copy(update={"name": "demo_hindsight", "gate": gate})
