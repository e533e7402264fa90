"""A learned preference, then a hint about another one: teacher `policy` leaves it, teacher `base` undoes it.

A tiny model answers with two words, each one of two, and both at even odds; with a hint in the prompt, the second word
is the hinted one. Rewards teach its adapter a first word; then hints to whole replies are about the second word only.
Both words go through the same weights, so that nothing but the teacher's word on the first can keep it where it is.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from clawloop.core.contracts.training import BatchSample
from clawloop.core.recipes.recipe import Advantage, Loss, Optimiser, Train
from clawloop.training.model.decoder import TorchtuneModel, load_torchtune_model
from clawloop.training.model.port import LoraShape
from clawloop.training.packing import Limits, TokenSequence, collate
from clawloop.training.step import make_optimizer, train_step
from tests.training.tiny import sample_id, save_checkpoint

VOCAB = 16
LIMITS = Limits(budget_tokens=4096, max_tokens=64, vocab_size=VOCAB)
PLAIN, HINTED = [1, 2], [1, 3, 2]
FIRST, SECOND = (4, 5), (6, 7)  # of each, the one to be preferred and the other
NO_PULL = Loss(kl=0)  # the KL would pull to the base model too, and hide who teaches


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> TorchtuneModel:
    """A model whose adapter prefers one first word; in float64 but for norms, LoRA and logits, ever in float32."""
    base = save_checkpoint(tmp_path_factory.mktemp("words"), vocab=VOCAB, positions=64)
    model = load_torchtune_model(
        base,
        LoraShape(rank=4, alpha=8.0),
        dtype=torch.float64,
        device=torch.device("cpu"),
        recompute_beyond=None,
    )
    make_it_read_hints(model)
    assert preferences(model, PLAIN) == pytest.approx((0.5, 0.5), abs=0.05)
    recipe = Train(loss=NO_PULL, optimiser=Optimiser(lr=5e-3))
    optimizer = make_optimizer(model, recipe.optimiser)
    for replies in itertools.islice(batches(model), 10):
        rewarded = [replace(reply, reward=1.0 if reply.response_ids[0] == FIRST[0] else -1.0) for reply in replies]
        train_step(model, optimizer, rewarded, recipe, LIMITS)
        if preferences(model, PLAIN)[0] > 0.95:
            break
    return model


def make_it_read_hints(model: TorchtuneModel) -> None:
    """Train the base weights on all replies, and on those with the hinted word where the hint is."""
    replies = [[first, second] for first in FIRST for second in SECOND]
    sequences = [TokenSequence("plain", PLAIN, reply, 1.0) for reply in replies]
    sequences += [TokenSequence("hinted", HINTED, reply, 1.0) for reply in replies if reply[1] == SECOND[0]]
    packed = collate(sequences, range(len(sequences)))
    weights = [parameter.requires_grad_() for parameter in model.parameters() if not parameter.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (-model(packed).logprobs_N.mean()).backward()
        optimizer.step()
    for weight in weights:
        weight.requires_grad_(False)


@torch.no_grad()
def log_odds(model: TorchtuneModel, prompt: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probs of the first word, [V], and of the second after each first one, [V, V]."""
    replies = [TokenSequence("any", prompt, [first, 0], 1.0) for first in range(VOCAB)]
    packed = collate(replies, range(VOCAB))
    both_NV = model.logits(model.hidden_states(packed)[packed.rows_N]).double().log_softmax(-1)
    return both_NV[0], both_NV[1::2]


def preferences(model: TorchtuneModel, prompt: list[int]) -> tuple[float, float]:
    """How likely the first and the second word to be preferred are: over all replies, not over drawn ones."""
    first_V, second_VV = log_odds(model, prompt)
    return float(first_V[FIRST[0]].exp()), float(first_V.exp() @ second_VV.exp()[:, SECOND[0]])


def batches(model: TorchtuneModel) -> Iterator[list[BatchSample]]:
    """Sixteen replies of the model as it is when asked for them; each batch a version's."""
    generator = torch.Generator().manual_seed(1)
    for version in itertools.count(1):
        first_V, second_VV = log_odds(model, PLAIN)
        firsts = torch.multinomial(first_V.exp(), 16, replacement=True, generator=generator).tolist()
        seconds = torch.multinomial(second_VV[firsts].exp(), 1, generator=generator).squeeze(-1).tolist()
        yield [
            BatchSample(
                sample_id=sample_id(index),
                prompt_ids=PLAIN,
                response_ids=[first, second],
                logprobs=[float(first_V[first]), float(second_VV[first, second])],
                temperature=1.0,
                version=version,
                reward=None,
            )
            for index, (first, second) in enumerate(zip(firsts, seconds, strict=True))
        ]


def after_hints(learned: TorchtuneModel, teacher: Literal["policy", "base"]) -> list[tuple[float, float]]:
    """The preferences after each of 40 steps on what the policy says then, each with a hint."""
    model = copy.deepcopy(learned)
    recipe = Train(loss=NO_PULL, advantage=Advantage(teacher=teacher), optimiser=Optimiser(lr=1e-3))
    optimizer = make_optimizer(model, recipe.optimiser)
    found = []
    for replies in itertools.islice(batches(model), 40):
        hinted = [replace(reply, hinted_prompts={0: HINTED}) for reply in replies]
        train_step(model, optimizer, hinted, recipe, LIMITS, parent=replies[0].version)
        found.append(preferences(model, PLAIN))
    return found


def test_with_the_policy_as_teacher_learned_preferences_stay(learned: TorchtuneModel) -> None:
    first, second = preferences(learned, PLAIN)
    after = after_hints(learned, "policy")
    moved = [abs(kept - first) for kept, _ in after]
    assert first > 0.9
    assert max(moved) < 0.05
    assert max(moved) > 1e-3, "hints move the weights that hold it"
    assert second < 0.65
    assert after[-1][1] > 0.85


def test_with_the_base_as_teacher_learned_preferences_are_undone(learned: TorchtuneModel) -> None:
    first, _ = preferences(learned, PLAIN)
    kept, taken_up = after_hints(learned, "base")[-1]
    assert first - kept > 0.05
    assert taken_up > 0.85
