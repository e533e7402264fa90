"""An engine's memory, by hand: SMALL has width 8, MLP 16, queries 16, keys 8, heads of 4, two layers, 1000 ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clawloop.app.layout import memory
from clawloop.app.layout.memory import LARGE_GPU, MIB, SMALL_GPU, Serving, chats_of_gateway, grammars_of_gateway
from clawloop.app.layout.model_folder import KvShape
from tests.unit.layout.shapes import QWEN3_4B, SMALL, request


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
