"""The trainer's memory, by hand: SMALL has width 8, MLP 16, queries 16, keys 8, heads of 4, two layers, 1000 ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clawloop.app.layout import memory
from clawloop.app.layout.memory import PartName
from clawloop.app.layout.plan import plan
from clawloop.app.layout.request import Limits, TrainingNeeds
from clawloop.core.errors import SetupError
from tests.unit.layout.shapes import QWEN3_4B, SMALL, request

NEEDS = TrainingNeeds(rank=2)


def test_an_adapter_is_rank_times_inputs_and_outputs_of_the_seven_projections() -> None:
    # q 8+16, k 8+8, v 8+8, o 16+8, gate 8+16, up 8+16, down 16+8; two layers, rank 2.
    assert SMALL.lora.parameters(2) == 2 * 2 * (24 + 16 + 16 + 24 + 24 + 24 + 24)
    assert memory.adapter_bytes(SMALL, NEEDS) == 16 * 608
    assert memory.version_bytes(SMALL, NEEDS) == 12 * 608


def test_base_weights_are_counted_in_their_dtype_beside_the_table_of_positions() -> None:
    parameters = 2 * (8 * 48 + 3 * 8 * 16) + 8000
    assert SMALL.text_parameters == parameters
    assert memory.base_bytes(SMALL, 2, positions=10) == 2 * parameters + 10 * 2 * 4 * 4


def test_each_layers_input_is_kept_and_one_layer_is_computed_again() -> None:
    assert memory.layer_inputs(SMALL, tokens=10, number_bytes=2) == 2 * 10 * 8 * 2
    norms, head_norms, rope = 8 * 14, (16 + 8) * 4, 4 * 4 * 2
    attention, mlp, low_rank = 4 * 16 * 2, 6 * 16 * 2, 6 * 2 * 2
    # Gradients of queries, keys and values take 6·16·2 + 8·2, less than what the MLP does.
    expected = 10 * (norms + attention + head_norms + rope + mlp + low_rank)
    assert memory.one_layer(SMALL, NEEDS, tokens=10, number_bytes=2) == expected


def test_in_float32_a_norms_input_is_no_copy() -> None:
    norms, head_norms, rope = 8 * 16, (16 + 8) * 4, 4 * 4 * 4
    attention, mlp, low_rank = 4 * 16 * 4, 6 * 16 * 4, 6 * 2 * 4
    expected = norms + attention + head_norms + rope + mlp + low_rank
    assert memory.one_layer(SMALL, NEEDS, tokens=1, number_bytes=4) == expected


def test_a_shared_beginning_takes_the_keys_and_values_of_one_branch_and_their_gradients() -> None:
    alone = memory.one_layer(SMALL, NEEDS, tokens=10, number_bytes=2)
    mlp, residual, joined_answers = 10 * (6 * 16 * 2 + 6 * 2 * 2), 10 * 8 * 2, 10 * 16 * 2
    together = memory.one_layer(SMALL, NEEDS, tokens=10, number_bytes=2, joined=7)
    assert together == alone - mlp + residual + joined_answers + (10 + 8 * 7) * 16 * 2


def test_logits_take_twelve_bytes_a_position_and_id_up_to_a_chunk() -> None:
    assert memory.logits(SMALL, NEEDS, positions=5) == 12 * 5 * 1000
    at_once = 2**26 // 1000
    assert memory.logits(SMALL, NEEDS, positions=10 * at_once) == 12 * at_once * 1000
    # Of four documents log-softmax is kept, and one is computed.
    assert memory.logits(SMALL, NEEDS, positions=4, longest=1) == (4 * 4 + 8 * 1) * 1000


def test_whole_distributions_and_entropy_take_more() -> None:
    compared = TrainingNeeds(rank=2, compares_distributions=True)
    both = TrainingNeeds(rank=2, compares_distributions=True, entropy=True)
    assert memory.logits(SMALL, compared, positions=5) == 20 * 5 * 1000
    assert memory.logits(SMALL, both, positions=5) == 24 * 5 * 1000


def test_logits_count_beyond_the_layer_whose_place_they_take() -> None:
    layer = memory.one_layer(SMALL, NEEDS, tokens=100, number_bytes=2)
    activations, beyond = memory.working_bytes(SMALL, NEEDS, 2, tokens=100, responses=50)
    assert activations == memory.layer_inputs(SMALL, 100, 2) + layer
    assert beyond == 12 * 50 * 1000 + 100 * 8 * (8 + 2 * 2) - layer
    assert memory.working_bytes(SMALL, NEEDS, 2, tokens=100, responses=1)[1] == 0


def test_passes_without_gradient_need_no_more_than_the_one_with() -> None:
    for needs in (TrainingNeeds(), TrainingNeeds(compares_distributions=True, entropy=True)):
        for tokens in (100, 1_000, 40_000):
            trained = sum(memory.working_bytes(QWEN3_4B, needs, 2, tokens=tokens, responses=tokens))
            assert memory.passes_before(QWEN3_4B, needs, tokens, 2) <= trained


def test_the_largest_micro_batch_is_a_longest_sample_and_half_a_budget() -> None:
    assert Limits(max_model_len=4000, max_sample_tokens=4000, micro_batch_tokens=1000).micro_batch == 4500
    assert Limits(max_model_len=4000, max_sample_tokens=400, micro_batch_tokens=1000).micro_batch == 600


def test_ranks_that_divide_the_model_hold_a_share_and_gather_the_rest() -> None:
    asked = request(SMALL, (80, 80, 80), training=NEEDS)
    whole = {part.name: part.bytes for part in memory.rank_parts(asked, 2, sharded=False)}
    divided = {part.name: part.bytes for part in memory.rank_parts(asked, 2, sharded=True)}
    assert divided[PartName.WEIGHTS] == whole[PartName.WEIGHTS] // 2
    assert divided[PartName.ADAPTER] == whole[PartName.ADAPTER] // 2
    layer = 2 * (8 * 48 + 3 * 8 * 16) + 608 // 2 * 4
    assert divided[PartName.GATHERED] == 8000 * 2 + 3 * layer
    assert divided[PartName.ACTIVATIONS] == whole[PartName.ACTIVATIONS]
    assert PartName.GATHERED not in whole


def test_a_base_in_4_bits_keeps_its_projections_small_and_unpacks_one_at_a_time() -> None:
    projections = 2 * (8 * 48 + 3 * 8 * 16)
    assert SMALL.lora.weights == projections
    assert memory.nf4_bytes(128 * 256, 2) == 128 * 256 // 2 + 128 * 256 // 64 + 2 * 2
    kept = memory.nf4_bytes(projections, 2)
    assert memory.base_bytes(SMALL, 2, positions=10, quantised=True) == 2 * 8000 + kept + 10 * 2 * 4 * 4
    assert memory.unpacked_bytes(SMALL, 2) == 8 * 16 * 14


def test_a_trainer_with_a_base_in_4_bits_fits_where_the_whole_one_does_not() -> None:
    asked = request(QWEN3_4B, (24,), limits=Limits(max_model_len=8192, max_sample_tokens=8192))
    with pytest.raises(SetupError, match="Qwen3-4B does not fit"):
        plan(asked)
    [_, learner] = plan(replace(asked, quantise="nf4")).processes
    assert learner.part(PartName.WEIGHTS) < 0.4 * 2 * QWEN3_4B.parameters
    assert learner.part(PartName.UNPACKED) == 14 * 2560 * 9728
    assert learner.arguments[-4:-2] == ("--quantise", "nf4")
