"""Advantages, the loss and its gradient against a slow implementation of the same formulas, over random batches."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from clawloop.core.algorithms.advantages import with_advantage
from clawloop.core.algorithms.losses import Divisor, step_loss
from clawloop.core.errors import NothingToTrain
from clawloop.core.recipes.recipe import Advantage
from tests.unit.algorithms.cases import as_recipe, gradients, logits_of, random_sample, run, scores_of, streams_of
from tests.unit.algorithms.plain import PlainPlan, PlainSample, PlainTerms, advantage, batch_loss, near_a_kink

pytestmark = pytest.mark.slow

plans = st.builds(
    PlainPlan,
    policy_gradient=st.sampled_from([0.0, 0.7, 1.0]),
    distillation=st.sampled_from([0.0, 0.5, 1.0]),
    kl=st.sampled_from([0.0, 0.02, 1.0]),
    entropy=st.sampled_from([0.0, 0.01]),
    low=st.sampled_from([0.1, 0.2]),
    high=st.sampled_from([0.28, 0.4]),
    dual=st.sampled_from([1.6, 3.0]),
    decoupled=st.booleans(),
    sequence=st.booleans(),
    forward=st.booleans(),
    clipped=st.booleans(),
    gap_clip=st.sampled_from([0.3, 1.0]),
    centred=st.booleans(),
)


terms = st.builds(
    PlainTerms,
    verdict_weight=st.sampled_from([0.0, 0.5, 1.0]),
    teacher_weight=st.sampled_from([0.0, 0.7, 1.0]),
    gap_clip=st.sampled_from([0.3, 2.0]),
    spare=st.floats(0, 1),
    centred=st.booleans(),
)


@st.composite
def batches(draw: st.DrawFn, plan: PlainPlan) -> list[PlainSample]:
    """One to four samples of unequal length, each with its own choice of streams."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    batch = []
    for _ in range(draw(st.integers(1, 4))):
        advantage = bool(plan.policy_gradient) and (not plan.distillation or draw(st.booleans()))
        batch.append(
            random_sample(
                rng,
                tokens=draw(st.integers(1, 6)),
                advantage=advantage,
                topk=bool(plan.distillation) and (not advantage or draw(st.booleans())),
                reference=draw(st.booleans()),
            )
        )
    return batch


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(1, 6),
    hint=st.booleans(),
    reward=st.sampled_from([None, 0.0, 1.0, -1.0]) | st.floats(-2, 2),
    terms=terms,
)
def test_the_advantage_equals_that_of_the_plain_implementation(
    seed: int, tokens: int, hint: bool, reward: float | None, terms: PlainTerms
) -> None:
    sample = random_sample(random.Random(seed), tokens=tokens, advantage=False, topk=False, hint=hint)
    streams = with_advantage(
        streams_of(sample),
        reward,
        Advantage(
            verdict_weight=terms.verdict_weight,
            teacher_weight=terms.teacher_weight,
            opd_clip=terms.gap_clip,
            spare_unlikely=terms.spare,
            centre_gap=terms.centred,
        ),
    )
    expected = advantage(sample, reward, terms)
    if streams.advantage_T is not None:
        assert streams.advantage_T.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    else:
        assert expected is None
        with pytest.raises(NothingToTrain, match="neither an advantage"):
            step_loss([(scores_of(sample, logits_of(sample)), streams)], as_recipe(PlainPlan()), Divisor.of([streams]))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_the_loss_equals_that_of_the_plain_implementation(data: st.DataObject) -> None:
    plan = data.draw(plans.filter(lambda plan: bool(plan.policy_gradient or plan.distillation)))
    batch = data.draw(batches(plan))
    loss = run(batch, [logits_of(sample) for sample in batch], as_recipe(plan))
    assert loss.loss.item() == pytest.approx(batch_loss(batch, plan), rel=1e-9, abs=1e-12)
    assert [metrics.tokens for metrics in loss.metrics] == [sum(sample.mask) for sample in batch]
    assert sum(loss.parts.values()) == pytest.approx(loss.loss.item(), rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_gradient_equals_central_differences_of_the_plain_loss(data: st.DataObject) -> None:
    plan = data.draw(plans.filter(lambda plan: bool(plan.policy_gradient or plan.distillation)))
    batch = data.draw(batches(plan))
    assume(not near_a_kink(batch, plan))
    frozen = [copy.deepcopy(sample.logits) for sample in batch]
    step = 1e-6
    for sample, gradient_TV in zip(batch, gradients(batch, as_recipe(plan)), strict=True):
        for t, row in enumerate(sample.logits):
            for v, value in enumerate(row):
                row[v] = value + step
                above = batch_loss(batch, plan, frozen)
                row[v] = value - step
                below = batch_loss(batch, plan, frozen)
                row[v] = value
                assert gradient_TV[t, v].item() == pytest.approx((above - below) / (2 * step), abs=2e-8)


def test_samples_of_one_batch_are_scored_in_float32_as_in_float64() -> None:
    rng = random.Random(3)
    plan = PlainPlan(distillation=0.5, entropy=0.01)
    batch = [random_sample(rng, tokens=tokens) for tokens in (3, 6)]
    wide = run(batch, [logits_of(sample) for sample in batch], as_recipe(plan)).loss
    narrow = run(batch, [logits_of(sample).float() for sample in batch], as_recipe(plan)).loss
    assert narrow.item() == pytest.approx(wide.item(), rel=1e-5)
