"""Errors of the reference system, each excluded by a test of the correct result."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from clawloop.core.algorithms.advantages import with_advantage
from clawloop.core.algorithms.losses import Divisor, step_loss
from clawloop.core.algorithms.rewards import group_advantages, integrated_reward, process_reward
from clawloop.core.algorithms.scoring import Scores, score
from clawloop.core.algorithms.streams import Streams, logprobs_T
from clawloop.core.errors import NothingToTrain, StreamsUnusable
from clawloop.core.ids import new_turn_id
from clawloop.core.recipes.recipe import Advantage, Signal, Train
from clawloop.core.samples.decision import JudgedTurn, at_least_one
from clawloop.training.packing import TokenSequence, collate
from tests.unit.algorithms.cases import (
    VOCABULARY,
    gradients,
    logits_of,
    random_sample,
    run,
    scores_of,
    streams_of,
)
from tests.unit.algorithms.shipped import RECIPES, gradient_of

THREE = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize("tokens", [2, 4])
def test_recorded_log_probs_of_another_length_are_refused_not_padded_or_cut(tokens: int) -> None:
    with pytest.raises(StreamsUnusable, match="3 response tokens"):
        Streams(response_mask_T=THREE, behaviour_logprob_T=torch.full((tokens,), -1.0))


def test_retokenised_text_of_another_length_is_refused_where_it_meets_its_scores() -> None:
    streams = Streams(response_mask_T=THREE, behaviour_logprob_T=torch.full((3,), -1.0), advantage_T=torch.ones(3))
    with pytest.raises(StreamsUnusable, match="4 scores for 3 response tokens"):
        step_loss([(Scores(logprob_T=torch.full((4,), -1.0)), streams)], Train(), Divisor(3, 1))


def test_an_unknown_log_prob_is_refused_not_taken_as_probability_one() -> None:
    with pytest.raises(StreamsUnusable, match="position 0"):
        logprobs_T([None, -0.5, -0.2], name="teacher_logprob_T")


def test_the_first_response_token_is_predicted_by_the_last_prompt_token() -> None:
    generator = torch.Generator().manual_seed(0)
    prompts, responses = [[3, 1, 4], [3, 1, 2]], [[1, 5], [6]]
    sequences = [
        TokenSequence(f"s{n}", *ids, temperature=1.0) for n, ids in enumerate(zip(prompts, responses, strict=True))
    ]
    # A model whose logits depend on the token they follow only.
    table_VV = torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    expected_VV = table_VV.log_softmax(-1)
    for share_prefixes in (True, False):
        packed = collate(sequences, [0, 1], share_prefixes=share_prefixes)
        logits_NV = table_VV[packed.tokens_S[packed.rows_N]]
        found = packed.split(score(logits_NV, packed.targets_N, temperature=1.0).logprob_T)
        torch.testing.assert_close(found[0], torch.stack([expected_VV[4, 1], expected_VV[1, 5]]))
        torch.testing.assert_close(found[1], expected_VV[2, 6].unsqueeze(0))
        assert found[0][0].item() < -0.01


def test_a_top_k_target_of_probability_one_for_every_id_is_refused() -> None:
    with pytest.raises(StreamsUnusable, match="add up"):
        Streams(
            response_mask_T=torch.tensor([True]),
            teacher_topk_ids_TK=torch.arange(4).unsqueeze(0),
            teacher_topk_logprobs_TK=torch.zeros(1, 4),
            teacher_tail_T=torch.tensor([-16.0]),
        )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_a_teacher_with_the_students_logits_has_no_gap_at_any_temperature(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(5, VOCABULARY, generator=generator)
    ids_T = torch.randint(VOCABULARY, (5,), generator=generator)
    own_T = (logits_TV / temperature).log_softmax(-1).gather(-1, ids_T.unsqueeze(-1)).squeeze(-1)
    streams = Streams(
        response_mask_T=torch.ones(5, dtype=torch.bool),
        answered_logprob_T=own_T,
        teacher_logprob_T=score(logits_TV, ids_T, temperature=temperature).logprob_T,
    )
    advantage_T = with_advantage(streams, None, Advantage()).advantage_T
    assert advantage_T is not None
    assert advantage_T.abs().max().item() < 1e-6


def test_a_sample_without_a_hint_has_no_teacher_term_however_far_the_policy_has_moved() -> None:
    sample = random_sample(random.Random(0), topk=False)
    streams = replace(streams_of(sample), advantage_T=None)
    assert streams.behaviour_logprob_T is not None
    drift_T = scores_of(sample, logits_of(sample)).logprob_T - streams.behaviour_logprob_T
    assert drift_T.abs().max().item() > 0.1
    advantage_T = with_advantage(streams, -1.0, Advantage()).advantage_T
    assert advantage_T is not None
    assert set(advantage_T.tolist()) == {-1.0}


def test_a_corrected_answer_is_not_rewarded_for_having_a_hint() -> None:
    own_T = torch.tensor([-1.0, -0.5, -2.0])
    streams = Streams(response_mask_T=THREE, answered_logprob_T=own_T, teacher_logprob_T=own_T)
    advantage_T = with_advantage(streams, None, Advantage()).advantage_T
    assert advantage_T is not None
    assert advantage_T.tolist() == [0.0, 0.0, 0.0]


def test_streams_without_a_trained_token_are_refused() -> None:
    with pytest.raises(NothingToTrain, match="3 tokens of which none"):
        Streams(response_mask_T=~THREE)
    with pytest.raises(NothingToTrain, match="0 tokens"):
        Streams(response_mask_T=THREE[:0])


def test_a_sample_without_signal_cannot_dilute_a_batch() -> None:
    rng = random.Random(0)
    batch = [random_sample(rng, topk=False), random_sample(rng, topk=False, advantage=False)]
    with pytest.raises(NothingToTrain, match="neither an advantage"):
        run(batch, [logits_of(sample) for sample in batch], Train())
    with pytest.raises(NothingToTrain, match="0 samples"):
        run([], [], Train())


def test_the_ratio_uses_recorded_log_probs_and_is_not_one_on_the_first_step() -> None:
    sample = random_sample(random.Random(0), topk=False)
    streams = streams_of(sample)
    (metrics,) = run([sample], [logits_of(sample)], Train()).metrics
    assert metrics.mean_abs_log_ratio is not None
    assert metrics.mean_abs_log_ratio > 0.1
    frozen_at_one = replace(streams, behaviour_logprob_T=scores_of(sample, logits_of(sample)).logprob_T.detach())
    logits_TV = logits_of(sample)
    pair = (scores_of(sample, logits_TV), frozen_at_one)
    (frozen_TV,) = torch.autograd.grad(step_loss([pair], Train(), Divisor.of([streams])).loss, logits_TV)
    (ours_TV,) = gradients([sample], Train())
    assert (ours_TV - frozen_TV).abs().max().item() > 0.01


def test_a_turn_chosen_so_that_a_session_gives_one_has_a_gradient() -> None:
    turns = [JudgedTurn(new_turn_id(), 0.0, True, False), JudgedTurn(new_turn_id(), -1 / 3, True, False)]
    chosen = at_least_one(turns)
    assert (chosen.turn_id, chosen.reward) == (turns[1].turn_id, -1 / 3)
    sample = random_sample(random.Random(0), topk=False, reference=False)
    streams = with_advantage(replace(streams_of(sample), advantage_T=None), chosen.reward, Advantage())
    logits_TV = logits_of(sample)
    loss = step_loss([(scores_of(sample, logits_TV), streams)], Train(), Divisor.of([streams])).loss
    assert torch.autograd.grad(loss, logits_TV)[0].abs().max().item() > 0.01


def test_a_lone_response_keeps_its_verdict_instead_of_being_normalised_away() -> None:
    assert group_advantages((-1.0,)) == (-1.0,)
    assert group_advantages((None, 1.0, None)) == (None, 1.0, None)


def reward_of(signal: Signal) -> float | None:
    """What an answer judged bad in two votes of three comes to; among four, and in a task that failed."""
    if signal.reward == "group":
        return group_advantages((1.0, -1.0, 1.0, 0.0))[1]
    if signal.reward == "outcome_process":
        return integrated_reward(-1, process_reward(-1 / 3, process_weight=signal.process_weight))
    return -1.0


def test_no_two_recipes_have_the_same_gradient_on_a_turn_with_verdict_and_hint() -> None:
    """The reference's LoRA path trains combined and distillation as plain RL."""
    found = {
        name: gradient_of(recipe.train, reward=reward_of(recipe.signal), hint=True) for name, recipe in RECIPES.items()
    }
    # `demo` differs by its pace, `quantised` where the engine does not compute as the trainer does, `judge` by the
    # rewards and by what an answer is, `hindsight` from `hybrid` by where its hint comes from.
    alike = {"combined", "demo", "quantised"}, {"grpo", "judge"}, {"hybrid", "hindsight"}
    for one, other in combinations(found, 2):
        if not any({one, other} <= group for group in alike):
            assert (found[one] - found[other]).abs().max().item() > 1e-3, (one, other)


def test_an_engine_of_other_weights_clips_no_token_of_the_quantised_recipe() -> None:
    """Half a nat, e^0.5 = 1.65, is beyond the clip of the ratio: `combined` loses the tokens that are to rise."""
    combined, quantised = (
        gradient_of(RECIPES[name].train, reward=1.0, hint=False, engine_below=0.5) for name in ("combined", "quantised")
    )
    assert combined.abs().max().item() == 0
    assert torch.allclose(quantised, math.exp(0.5) * gradient_of(RECIPES["combined"].train, reward=1.0, hint=False))
