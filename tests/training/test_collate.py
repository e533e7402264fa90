"""Packing: every sample once, whole, under the budget, and each value back to its sample."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from clawloop.core.errors import SampleUnusable
from clawloop.training.packing import Limits, TokenSequence, collate, filler, plan_micro_batches
from tests.training.tiny import VOCAB, random_sequences

lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=20)


@given(lengths, st.integers(1, 80))
def test_every_sample_is_in_exactly_one_micro_batch_under_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    sequences = random_sequences(lengths)
    # Random samples may begin with the same token: a chat may go over the budget, and is no subject of this test.
    limits = Limits(budget_tokens=budget, max_tokens=64, vocab_size=VOCAB, share_prefixes=False)
    made = plan_micro_batches(sequences, limits)
    assert sorted(index for members in made for index in members) == list(range(len(sequences)))
    for members in made:
        tokens = len(collate(sequences, members).tokens_S)
        assert tokens <= budget or len(members) == 1
    assert made == plan_micro_batches(sequences, limits)


def test_a_plan_fills_micro_batches_before_it_adds_another() -> None:
    sequences = random_sequences([(5, 1), (8, 2), (3, 1), (6, 1)])  # 5, 9, 3 and 6 tokens are read
    assert plan_micro_batches(sequences, Limits(12, 64, VOCAB)) == ((1, 2), (0, 3))


@given(lengths)
def test_a_micro_batch_concatenates_its_documents(lengths: list[tuple[int, int]]) -> None:
    sequences = random_sequences(lengths)
    packed = collate(sequences, range(len(sequences)), share_prefixes=False)
    lengths_read = list(packed.layout.lengths)
    assert sum(lengths_read) == len(packed.tokens_S) == len(packed.positions_S)
    documents = torch.split(packed.tokens_S, lengths_read)
    positions = torch.split(packed.positions_S, lengths_read)
    rows = packed.split(packed.rows_N)
    targets = packed.split(packed.targets_N)
    start = 0
    for index, sequence in enumerate(sequences):
        whole = [*sequence.prompt_ids, *sequence.response_ids]
        assert documents[index].tolist() == whole[:-1]
        assert positions[index].tolist() == list(range(len(whole) - 1))
        assert targets[index].tolist() == list(sequence.response_ids)
        # Each row is the position just before the token it predicts.
        assert [whole[row - start + 1] for row in rows[index].tolist()] == list(sequence.response_ids)
        assert packed.temperatures[index] == sequence.temperature
        start += len(whole) - 1


def test_join_is_the_inverse_of_split() -> None:
    sequences = random_sequences([(2, 3), (4, 1), (1, 2)])
    packed = collate(sequences, (0, 2))
    values = torch.arange(5.0)
    parts = packed.split(values)
    assert {index: part.tolist() for index, part in parts.items()} == {0: [0, 1, 2], 2: [3, 4]}
    whole = [parts[0], torch.zeros(1), parts[2]]
    assert torch.equal(packed.join(whole), values)
    with pytest.raises(ValueError, match="lengths"):
        packed.join([torch.zeros(2), torch.zeros(1), torch.zeros(2)])


def test_a_sample_that_is_too_long_is_refused_not_cut() -> None:
    limits = Limits(budget_tokens=8, max_tokens=20, vocab_size=VOCAB)
    assert plan_micro_batches(random_sequences([(10, 11)]), limits) == ((0,),)
    with pytest.raises(SampleUnusable, match="sample s1: 21 tokens, the trainer takes 20"):
        plan_micro_batches(random_sequences([(1, 1), (10, 12)]), limits)


@pytest.mark.parametrize(("prompt", "response"), [([VOCAB], [0]), ([0], [VOCAB]), ([-1], [0])])
def test_ids_outside_the_vocabulary_are_refused(prompt: list[int], response: list[int]) -> None:
    with pytest.raises(SampleUnusable, match="the vocabulary has 199"):
        plan_micro_batches([TokenSequence("x", prompt, response, 1.0)], Limits(64, 64, VOCAB))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature: float) -> None:
    with pytest.raises(SampleUnusable, match="temperature"):
        TokenSequence("x", [1], [2], temperature)


@pytest.mark.parametrize(("prompt", "response"), [([], [1]), ([1], [])])
def test_a_sample_needs_a_prompt_and_a_response(prompt: list[int], response: list[int]) -> None:
    with pytest.raises(SampleUnusable, match="at least one token"):
        TokenSequence("x", prompt, response, 1.0)


def test_a_filler_belongs_to_no_sample() -> None:
    packed = filler()
    assert packed.is_filler
    assert packed.split(torch.zeros(1)) == {}
    assert not collate(random_sequences([(1, 1)]), [0]).is_filler
