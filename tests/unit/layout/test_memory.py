"""Memory of engines and trainers, by the shapes of models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from clawloop.app.layout import memory
from clawloop.app.layout.memory import (
    LARGE_GPU,
    MIB,
    SMALL_GPU,
    PartName,
    Serving,
    chats_of_gateway,
    grammars_of_gateway,
)
from clawloop.app.layout.model_folder import KvShape, read_model_shape
from clawloop.app.layout.plan import plan
from clawloop.app.layout.request import Limits, TrainingNeeds
from clawloop.core.errors import SetupError
from tests.unit.layout.folders import QWEN3, qwen3_tensors, write_folder
from tests.unit.layout.shapes import QWEN3_4B, SMALL, request

# An engine's memory, by hand: SMALL has width 8, MLP 16, queries 16, keys 8, heads of 4, two layers, 1000 ids.


def test_lora_slots_are_whole_on_one_gpu_and_half_cut_on_two() -> None:
    # Per layer and rank: A of q k v gate up reads 8 each, of o 16, of down 16; B gives 16 8 8 16 16, 8, 8.
    reads_width, gives_width, reads_wide, gives_wide = 5 * 8, 2 * 8, 16 + 16, 16 + 8 + 8 + 16 + 16
    one = 2 * (reads_width + gives_width + reads_wide + gives_wide)
    assert memory.lora_slots(SMALL, loras=3, rank=8, number_bytes=2) == 3 * 8 * one * 2
    two = 2 * (reads_width + gives_width) + (reads_wide + gives_wide)
    assert memory.lora_slots(SMALL, loras=3, rank=8, number_bytes=2, gpus=2) == 3 * 8 * two * 2
    assert SMALL.lora.parameters(8) == 8 * one


def test_the_cache_holds_whole_blocks_and_an_empty_one() -> None:
    asked, serving = request(SMALL, (80,)), Serving(seqs=1, batched_tokens=64, block_tokens=16)
    per_token = 2 * 2 * 8 * 2  # layers, keys and values, features, bytes
    assert memory.kv_bytes(asked, 17, serving) == 3 * 16 * per_token
    assert memory.kv_bytes(asked, 17, serving, gpus=2) == 3 * 16 * per_token // 2
    # No head is cut: four GPUs hold as much each as two.
    assert memory.kv_bytes(asked, 17, serving, gpus=4) == 3 * 16 * per_token // 2


def test_qwen3_4b_takes_144_kib_a_token() -> None:
    assert QWEN3_4B.kv.full * 2 == 36 * 2 * 8 * 128 * 2 == 144 * 1024


@pytest.mark.parametrize("tokens", [1, 16, 17, 500, 32768])
def test_a_cache_made_for_some_tokens_holds_them(tokens: int) -> None:
    asked = request(SMALL, (80,))
    held = memory.kv_tokens(asked, memory.kv_bytes(asked, tokens, SMALL_GPU), SMALL_GPU)
    assert tokens <= held < tokens + 16


def test_layers_with_a_window_keep_no_more_than_it_and_a_batch() -> None:
    windowed = replace(SMALL, kv=KvShape(full=10, sliding=50, window=100, state=7))
    assert windowed.kv.numbers(60, batched_tokens=20) == 600 + 50 * 60 + 7
    assert windowed.kv.numbers(1000, batched_tokens=20) == 10_000 + 50 * 120 + 7


def test_reading_is_a_batch_or_the_sampler_whichever_is_more() -> None:
    # Residual, hidden state, norm; gate, up, product: 3·8 + 3·16 numbers a token.
    assert memory.reading_bytes(SMALL, Serving(seqs=1, batched_tokens=1000), 2) == 1000 * 2 * (24 + 48)
    assert memory.reading_bytes(SMALL, Serving(seqs=64, batched_tokens=1), 2) == 64 * 1000 * 40


def test_graphs_are_counted_by_batch_size() -> None:
    # 1, 2, 4, 8, 16, …, 120, 128 for mixed batches, up to 64 for decoding alone; both without an adapter too.
    assert memory.graph_bytes(SMALL_GPU, with_lora=True) == ((3 + 16) + (3 + 8)) * 2 * 9 * MIB
    assert memory.graph_bytes(SMALL_GPU, with_lora=False) == ((3 + 16) + (3 + 8)) * 9 * MIB
    # vLLM's own count for 256 requests: 51 and 35.
    assert memory.graph_bytes(LARGE_GPU, with_lora=False) == (51 + 35) * 9 * MIB


def test_on_a_cpu_the_vocabulary_is_packed_twice_whether_it_is_one_matrix_or_two() -> None:
    assert memory.packed_vocabulary(SMALL, 2) == 2 * 1000 * 8 * 2
    assert memory.packed_vocabulary(replace(SMALL, tied=False), 2) == 2 * 1000 * 8 * 2


@pytest.mark.parametrize(
    ("seqs", "gateways", "each"),
    [(64, 1, 56), (64, 2, 28), (256, 2, 112), (64, 3, 18), (9, 1, 7), (1, 1, 1), (4, 8, 1)],
)
def test_gateways_together_leave_an_eighth_of_an_engine_free(seqs: int, gateways: int, each: int) -> None:
    assert chats_of_gateway(seqs, gateways) == each


@pytest.mark.parametrize(
    ("cores", "gateways", "each"), [(1, 1, 4), (2, 2, 2), (2, 3, 1), (2, 8, 1), (10, 2, 2), (18, 2, 4), (64, 2, 15)]
)
def test_gateways_share_the_grammars_that_an_engine_compiles_at_once(cores: int, gateways: int, each: int) -> None:
    assert grammars_of_gateway(cores, gateways) == each
    threads = (cores + 1) // 2  # of vLLM
    assert threads < 5 or each * gateways < threads


# The trainer's memory, by hand: SMALL has width 8, MLP 16, queries 16, keys 8, heads of 4, two layers, 1000 ids.

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
            # One layer's intermediates, or the logits of one document; the base model is the same weights.
            one_layer = tokens * 2 * (4 * QWEN3_4B.width + 3 * QWEN3_4B.inner + 3 * QWEN3_4B.query)
            assert max(one_layer, memory.logits(QWEN3_4B, needs, tokens)) <= trained


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


# Folders with quantised weights: the shape of the model they stand for, and the bytes they take.

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
Stored = dict[str, NDArray[np.generic]]


def stored_as(method: str, outputs: int, inputs: int) -> Stored:
    """A projection as this method stores it, with groups of eight inputs."""
    groups, word = inputs // 8, np.int32
    scales = np.zeros((groups, outputs), np.float16)
    match method:
        case "awq":
            zeros = np.zeros((groups, outputs // 8), word)
            return {"qweight": np.zeros((inputs, outputs // 8), word), "scales": scales, "qzeros": zeros}
        case "gptq":
            zeros, order = np.zeros((groups, outputs // 8), word), np.zeros(inputs, word)
            packed = np.zeros((inputs // 8, outputs), word)
            return {"qweight": packed, "scales": scales, "qzeros": zeros, "g_idx": order}
        case "fp8":  # numpy has no eight-bit floats; the header's dtype is a byte's all the same
            return {"weight": np.zeros((outputs, inputs), np.uint8), "weight_scale": np.zeros(1, np.float32)}
        case _:
            packed = np.zeros((outputs, inputs // 8), word)
            return {"weight_packed": packed, "weight_scale": scales.T.copy(), "weight_shape": np.zeros(2, np.int64)}


def write_quantised(folder: Path, config: dict[str, object]) -> tuple[Path, int]:
    """A folder, and the bytes of its tensors."""
    write_folder(folder, {**QWEN3, "quantization_config": config})
    tensors: Stored = {}
    for name, shape in qwen3_tensors().items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            stored = stored_as(str(config["quant_method"]), *shape)
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in stored.items()}
        else:
            tensors[name] = np.zeros(shape, np.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder, sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("config", [AWQ, GPTQ, FP8, COMPRESSED], ids=lambda config: str(config["quant_method"]))
def test_a_quantised_model_has_the_shape_of_the_whole_one_and_its_own_bytes(
    config: dict[str, object], tmp_path: Path
) -> None:
    folder, size = write_quantised(tmp_path / "quantised", config)
    whole, shape = read_model_shape(write_folder(tmp_path / "whole")), read_model_shape(folder)
    for name in ("parameters", "lora", "kv", "query"):
        assert getattr(shape, name) == getattr(whole, name)
    assert shape.stored_bytes == size
    assert shape.quantised == config["quant_method"]
    assert whole.stored_bytes is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq"}, "does not give the bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "does not give the bits"),
        (
            {"quant_method": "bitsandbytes"},
            "quantised by 'bitsandbytes', whose memory is not computed",
        ),
    ],
)
def test_what_cannot_be_computed_is_one_clear_line(config: dict[str, object], said: str, tmp_path: Path) -> None:
    folder, _ = write_quantised(tmp_path / "quantised", {**config})
    with pytest.raises(SetupError, match=said):
        read_model_shape(folder)


def test_a_packed_projection_without_scales_is_one_clear_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "cut", {**QWEN3, "quantization_config": AWQ})
    with pytest.raises(SetupError, match=r"config\.json, but has no scales"):
        read_model_shape(folder)
    tensors: Stored = {
        "model.layers.0.self_attn.q_proj.qweight": np.zeros((8, 2), np.int32),
        "model.layers.0.self_attn.k_proj.scales": np.zeros((2, 2), np.float16),
    }
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SetupError, match=r"lacks the scales of model\.layers\.0\.self_attn\.q_proj"):
        read_model_shape(folder)
