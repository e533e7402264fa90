"""Padding, order of samples, split of a step and chunks change neither loss nor gradient."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from clawloop.core.algorithms.losses import Divisor, aggregate
from clawloop.core.algorithms.scoring import score
from clawloop.core.errors import NothingToTrain
from clawloop.core.recipes.recipe import Loss, Train
from tests.unit.algorithms.cases import VOCABULARY, gradients, logits_of, random_sample, run, streams_of
from tests.unit.algorithms.plain import PlainSample

RECIPES = [
    Train(loss=Loss(distillation=0.5, entropy=0.01)),
    Train(loss=Loss(distillation=0.5, entropy=0.01, aggregation="sequence")),
    Train(loss=Loss(distillation=0.5, correction="decoupled")),
]


@pytest.fixture
def batch() -> list[PlainSample]:
    rng = random.Random(11)
    return [random_sample(rng, tokens=tokens) for tokens in (2, 9, 4, 1)]


def padded(sample: PlainSample, tokens: int) -> PlainSample:
    """The sample with masked tokens behind it whose numbers are extreme."""
    longer = copy.deepcopy(sample)
    longer.logits += [[1e4] + [-1e4] * (VOCABULARY - 1)] * tokens
    longer.ids += [3] * tokens
    longer.mask += [False] * tokens
    longer.behaviour += [-1e4] * tokens
    for stream in (longer.advantage, longer.reference, longer.prox):
        assert stream is not None
        stream += [-1e4] * tokens
    assert longer.topk_ids is not None
    assert longer.topk_logprobs is not None
    assert longer.tail is not None
    assert longer.answered_topk is not None
    assert longer.within is not None
    longer.answered_topk += [[-1e4] * 3] * tokens
    longer.within += [[True] * 3] * tokens
    longer.topk_ids += [[4, 5, 6]] * tokens
    longer.topk_logprobs += [[-1e4] * 3] * tokens
    longer.tail += [0.0] * tokens
    return longer


@pytest.mark.parametrize("recipe", RECIPES)
def test_padding_changes_neither_loss_nor_gradient_and_has_no_gradient(batch: list[PlainSample], recipe: Train) -> None:
    longer = [padded(sample, 12 - len(sample.ids)) for sample in batch]
    before, after = gradients(batch, recipe), gradients(longer, recipe)
    for sample, plain_TV, padded_TV in zip(batch, before, after, strict=True):
        tokens = len(sample.ids)
        torch.testing.assert_close(padded_TV[:tokens], plain_TV, rtol=0, atol=0)
        assert padded_TV[tokens:].abs().max().item() == 0.0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("split", [[4], [1, 3], [2, 2], [1, 1, 1, 1]])
def test_any_split_of_a_step_adds_up_to_the_same_loss_and_gradient(
    batch: list[PlainSample], recipe: Train, split: list[int]
) -> None:
    """Micro-batches of one process, and ranks whose gradients are summed."""
    whole_loss = run(batch, [logits_of(sample) for sample in batch], recipe).loss
    whole = gradients(batch, recipe)
    starts = [sum(split[:index]) for index in range(len(split))]
    micros = [batch[start : start + size] for start, size in zip(starts, split, strict=True)]
    divisor = Divisor(0, 0)
    for micro in micros:
        divisor += Divisor.of(streams_of(sample) for sample in micro)
    total = 0.0
    found: list[torch.Tensor] = []
    for micro in micros:
        logits = [logits_of(sample) for sample in micro]
        loss = run(micro, logits, recipe, divisor).loss
        total += loss.item()
        found += torch.autograd.grad(loss, logits)
    assert total == pytest.approx(whole_loss.item(), rel=1e-12)
    # Without any division the parts would add up as well, to something else: each sample counts as it does alone.
    alone = [run([sample], [logits_of(sample)], recipe).loss.item() for sample in batch]
    weights = [1 if recipe.loss.aggregation == "sequence" else sum(sample.mask) for sample in batch]
    mean = sum(weight * loss for weight, loss in zip(weights, alone, strict=True)) / sum(weights)
    assert total == pytest.approx(mean, rel=1e-12)
    for plain_TV, split_TV in zip(whole, found, strict=True):
        torch.testing.assert_close(split_TV, plain_TV, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_order_of_samples_changes_nothing_but_the_order(batch: list[PlainSample], recipe: Train) -> None:
    order = [2, 0, 3, 1]
    straight = gradients(batch, recipe)
    shuffled = gradients([batch[index] for index in order], recipe)
    for index, gradient_TV in zip(order, shuffled, strict=True):
        torch.testing.assert_close(gradient_TV, straight[index], rtol=1e-12, atol=1e-14)


def test_aggregation_weights_every_token_or_every_sample_the_same() -> None:
    rng = random.Random(1)
    short, long = (random_sample(rng, tokens=tokens, masked=False, topk=False, reference=False) for tokens in (1, 4))
    for sample in (short, long):
        # Uniform logits and ratios of 1: every token pulls equally.
        sample.logits = [[0.0] * VOCABULARY for _ in sample.ids]
        sample.temperature = 1.0
        sample.behaviour = [-torch.tensor(float(VOCABULARY)).log().item()] * len(sample.ids)
        sample.advantage = [1.0] * len(sample.ids)
    one, four = (g.abs().sum().item() for g in gradients([short, long], Train()))
    assert four == pytest.approx(4 * one, rel=1e-5)
    one, four = (g.abs().sum().item() for g in gradients([short, long], Train(loss=Loss(aggregation="sequence"))))
    assert four == pytest.approx(one, rel=1e-5)


def test_all_samples_of_an_episode_weigh_as_much_as_one_sample() -> None:
    # An episode of two samples with 2 and 6 tokens, and a chat's sample of 4.
    divisor = Divisor(tokens=12, samples=3, sequences=2)
    shares = [
        float(aggregate(torch.ones(tokens), divisor, "sequence", whole)) for tokens, whole in ((2, 8), (6, 8), (4, 4))
    ]
    assert shares == pytest.approx([0.125, 0.375, 0.5])
    assert float(aggregate(torch.ones(2), divisor, "token", 8)) == pytest.approx(2 / 12)


def test_a_divisor_that_counts_less_than_the_batch_is_refused(batch: list[PlainSample]) -> None:
    logits = [logits_of(sample) for sample in batch]
    with pytest.raises(NothingToTrain, match="counts 3"):
        run(batch, logits, Train(), Divisor(tokens=100, samples=3))
    with pytest.raises(NothingToTrain, match="counts 1"):
        run(batch, logits, Train(), Divisor(tokens=1, samples=4))


def test_scoring_in_chunks_of_positions_gives_the_same_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(10, VOCABULARY, generator=generator)
    ids_T = torch.randint(VOCABULARY, (10,), generator=generator)
    whole = score(logits_TV, ids_T, temperature=0.6, entropy=True)
    for field in ("logprob_T", "entropy_T"):
        chunks = [
            getattr(score(logits_TV[a:b], ids_T[a:b], temperature=0.6, entropy=True), field)
            for a, b in ((0, 3), (3, 4), (4, 10))
        ]
        torch.testing.assert_close(torch.cat(chunks), getattr(whole, field), rtol=0, atol=0)
