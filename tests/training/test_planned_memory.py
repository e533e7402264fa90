"""What the layout says a step's tensors take, beside torch's own record of every allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torchao.dtypes.nf4tensor import NF4Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawloop.app.layout import memory
from clawloop.app.layout.model_folder import ModelShape, read_model_shape
from clawloop.app.layout.request import TrainingNeeds
from clawloop.core.contracts.training import BatchSample
from clawloop.core.recipes.recipe import Bounds, Distillation, Loss, Train
from clawloop.training.model.decoder import is_lora, load_torchtune_model
from clawloop.training.model.port import LoraShape
from clawloop.training.packing import Limits
from clawloop.training.step import make_optimizer, train_step
from tests.training.test_memory import peak_bytes
from tests.training.tiny import sample_id

LIMITS = Limits(budget_tokens=1, max_tokens=8192, vocab_size=0)
ANYTHING = Bounds(kl=1e9, ratio=1e9)  # random weights are far from themselves
RECIPES = {
    "plain": (Train(bounds=ANYTHING), TrainingNeeds()),
    "entropy": (Train(bounds=ANYTHING, loss=Loss(entropy=0.01)), TrainingNeeds(entropy=True)),
    "distributions": (
        Train(bounds=ANYTHING, loss=Loss(distillation=1.0), distillation=Distillation(top_k=8)),
        TrainingNeeds(compares_distributions=True),
    ),
}


def save_model(folder: Path, dtype: torch.dtype, **shape: int) -> Path:
    """A random model of this shape, as far as a layout looks at it."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=10000.0)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def samples(vocab: int, lengths: Sequence[tuple[int, int]], *, shared: int = 0) -> list[BatchSample]:
    """Samples of (prompt, response) lengths; the first tokens of their prompts are the same ones."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(0, vocab, (count,), generator=generator).tolist()
        return found

    beginning = ids(shared)
    made = []
    for number, (prompt, response) in enumerate(lengths):
        prompt_ids = [*beginning, *ids(prompt - shared)]
        made.append(
            BatchSample(
                sample_id=sample_id(number),
                prompt_ids=prompt_ids,
                response_ids=ids(response),
                logprobs=[-math.log(vocab)] * response,
                temperature=0.6,
                version=0,
                reward=1.0,
                hinted_prompts={0: [*prompt_ids[:-4], *ids(4)]},
            )
        )
    return made


def measured_step(
    folder: Path, dtype: torch.dtype, recipe: Train, batch: list[BatchSample], budget: int = 1, kept: int = 0
) -> tuple[int, ModelShape]:
    """Peak bytes of a second step's tensors beyond model, adapter and optimiser.

    Args:
        kept: tokens of the largest micro-batch of which no layer is computed again.
    """
    lora, cpu = LoraShape(rank=16, alpha=32.0), torch.device("cpu")
    model = load_torchtune_model(folder, lora, dtype=dtype, device=cpu, recompute_beyond=kept)
    optimizer = make_optimizer(model, recipe.optimiser)
    limits = Limits(budget, 8192, model.architecture.vocab_size)
    train_step(model, optimizer, batch, recipe, limits)
    gradient = sum(parameter.numel() * 4 for parameter in model.adapter_parameters().values())
    peak = peak_bytes(folder, lambda: train_step(model, optimizer, batch, recipe, limits))
    # The first step's gradient was there before, is let go, and made again: the record counts that below zero.
    return peak + gradient, read_model_shape(folder)


# A processor without instructions for bfloat16 copies an eighth more.
COPIES_BFLOAT16 = not torch.cpu.get_capabilities().get("avx512_bf16", False)
SHAPES = {
    "like Qwen3": {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "num_key_value_heads": 2},
    "wide MLP": {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4},
}


# `make test` measures each dtype and each shape once.
CASES = [
    ("like Qwen3", torch.float32),
    ("wide MLP", torch.bfloat16),
    pytest.param("like Qwen3", torch.bfloat16, marks=pytest.mark.long),
    pytest.param("wide MLP", torch.float32, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_activations_are_what_was_planned(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path, dtype, vocab_size=512, num_hidden_layers=3, head_dim=32, **SHAPES[shape])
    batch = samples(512, [(1990, 11), (1980, 11)])
    measured, found = measured_step(folder, dtype, RECIPES["plain"][0], batch)
    planned = memory.working_bytes(found, TrainingNeeds(), dtype.itemsize, tokens=2000, responses=11, longest=11)
    assert planned[1] == 0
    assert planned[0] == pytest.approx(measured, rel=0.2 if dtype is torch.bfloat16 and COPIES_BFLOAT16 else 0.1)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_layers_that_are_kept_take_what_was_planned(shape: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path, dtype, vocab_size=512, num_hidden_layers=6, head_dim=32, **SHAPES[shape])
    batch = samples(512, [(990, 11), (980, 11)])
    measured, found = measured_step(folder, dtype, RECIPES["plain"][0], batch, kept=1000)

    def planned(recomputed: bool) -> int:
        needs, b = TrainingNeeds(), dtype.itemsize
        return sum(memory.working_bytes(found, needs, b, tokens=1000, responses=11, longest=11, recomputed=recomputed))

    assert planned(False) == pytest.approx(measured, rel=0.2 if dtype is torch.bfloat16 and COPIES_BFLOAT16 else 0.1)
    assert measured > 2 * planned(True)


def test_kept_layers_of_a_chat_that_shares_its_beginning_take_what_was_planned(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path, torch.float32, vocab_size=512, num_hidden_layers=6, head_dim=32, **SHAPES["like Qwen3"]
    )
    batch = samples(512, [(900, 101)] * 10, shared=900)
    measured, found = measured_step(folder, torch.float32, RECIPES["plain"][0], batch, budget=2000, kept=2000)
    planned = memory.working_bytes(
        found, TrainingNeeds(), 4, tokens=1900, responses=1010, longest=101, joined=1000, recomputed=False
    )
    assert sum(planned) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("recipe", "responses"),
    [*((recipe, 300) for recipe in RECIPES), pytest.param("plain", 2500, marks=pytest.mark.long)],
)
def test_logits_are_what_was_planned(recipe: str, responses: int, tmp_path: Path) -> None:
    """Of one chunk, and of more than the 2,048 positions that are one."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    folder = save_model(tmp_path, torch.bfloat16, vocab_size=32768, num_hidden_layers=1, head_dim=32, **small)
    train, needs = RECIPES[recipe]
    batch = samples(32768, [(20, responses), (20, responses)])
    measured, found = measured_step(folder, torch.bfloat16, train, batch)
    tokens = 19 + responses
    planned = memory.working_bytes(found, needs, 2, tokens=tokens, responses=responses, longest=responses)
    assert planned[1] > planned[0]
    assert sum(planned) == pytest.approx(measured, rel=0.05)


def test_a_chat_that_shares_its_beginning_fills_the_largest_micro_batch(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path, torch.bfloat16, vocab_size=512, num_hidden_layers=3, head_dim=32, **SHAPES["like Qwen3"]
    )
    batch = samples(512, [(1900, 101)] * 10, shared=1900)
    measured, found = measured_step(folder, torch.bfloat16, RECIPES["plain"][0], batch, budget=2000)
    # The longest has 2,000 tokens, and half a budget joins it: 1,900 and ten answers of 100.
    planned = memory.working_bytes(found, TrainingNeeds(), 2, tokens=2900, responses=1010, longest=101, joined=2000)
    assert sum(planned) == pytest.approx(measured, rel=0.1)


def test_an_adapter_takes_sixteen_bytes_a_parameter(tmp_path: Path) -> None:
    folder = save_model(
        tmp_path, torch.float32, vocab_size=512, num_hidden_layers=3, head_dim=32, **SHAPES["like Qwen3"]
    )
    model = load_torchtune_model(folder, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    recipe = RECIPES["plain"][0]
    optimizer = make_optimizer(model, recipe.optimiser)
    train_step(model, optimizer, samples(512, [(20, 5)]), recipe, Limits(64, 8192, 512))
    held = 0
    for parameter in model.adapter_parameters().values():
        assert parameter.grad is not None
        moments = [value for name, value in optimizer.state[parameter].items() if name != "step"]
        held += sum(tensor.numel() * tensor.element_size() for tensor in (parameter, parameter.grad, *moments))
    assert held == memory.adapter_bytes(read_model_shape(folder), TrainingNeeds(rank=4))
    base = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    frozen = base - held // 4
    assert memory.base_bytes(read_model_shape(folder), 4, positions=8192) == pytest.approx(frozen, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_a_base_in_4_bits_takes_what_was_planned(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_model(tmp_path, dtype, vocab_size=512, num_hidden_layers=3, head_dim=32, **SHAPES["wide MLP"])
    shape, cpu, lora = read_model_shape(folder), torch.device("cpu"), LoraShape(rank=16, alpha=32.0)
    model = load_torchtune_model(folder, lora, dtype=dtype, device=cpu, quantisation="nf4")
    frozen = [*(parameter for name, parameter in model.named_parameters() if not is_lora(name)), *model.buffers()]
    assert sum(isinstance(tensor, NF4Tensor) for tensor in frozen) == 21
    held = sum(_bytes(tensor) for tensor in frozen)
    assert memory.base_bytes(shape, dtype.itemsize, 8192, quantised=True) == pytest.approx(held, rel=0.01)
    assert memory.base_bytes(shape, dtype.itemsize, 8192) > 2 * held

    optimizer = make_optimizer(model, RECIPES["plain"][0].optimiser)
    batch = samples(512, [(390, 11), (380, 11)])

    def step() -> None:
        train_step(model, optimizer, batch, RECIPES["plain"][0], Limits(1, 8192, 512))

    step()
    gradient = sum(parameter.numel() * 4 for parameter in model.adapter_parameters().values())
    measured = peak_bytes(tmp_path, step) + gradient
    activations = memory.working_bytes(shape, TrainingNeeds(), dtype.itemsize, tokens=400, responses=11, longest=11)
    unpacked = memory.unpacked_bytes(shape, dtype.itemsize)
    assert sum(activations) + unpacked == pytest.approx(measured, rel=0.1)


def _bytes(tensor: torch.Tensor) -> int:
    if isinstance(tensor, NF4Tensor):
        parts = (tensor.quantized_data, tensor.quantized_scalers, tensor.quantization_factor, tensor.nf4)
        return sum(part.nbytes for part in parts)
    return tensor.nbytes
