"""A base model in 4 bits: near the whole one, a third of its memory, and only with a decoupled ratio."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torchao.dtypes.nf4tensor import NF4Tensor

from clawloop.core.errors import RecipeRejected
from clawloop.core.recipes.recipe import Loss, Recipe
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape
from clawloop.training.options import Backend
from clawloop.training.packing import collate
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.training.steps import RECIPE, completed, never, samples_of, setup_of, step_of
from tests.training.tiny import random_sequences

DECOUPLED: Recipe = RECIPE.model_copy(
    update={"train": RECIPE.train.model_copy(update={"loss": Loss(kl=0.1, correction="decoupled")})}
)


@pytest.mark.parametrize("backend", ["torchtune", "transformers"])
def test_a_quantised_base_is_near_the_whole_one_and_smaller(backend: Backend, qwen3: Path) -> None:
    lora, cpu = LoraShape(rank=4, alpha=8.0), torch.device("cpu")
    whole, quantised = (
        load_model(qwen3, lora, dtype=torch.float32, device=cpu, backend=backend, quantisation=quantisation)
        for quantisation in (None, "nf4")
    )
    assert isinstance(quantised, torch.nn.Module)
    weights = [parameter for parameter in quantised.parameters() if isinstance(parameter, NF4Tensor)]
    assert len(weights) == 21
    small = sum(w.quantized_data.nbytes + w.quantized_scalers.nbytes + w.quantization_factor.nbytes for w in weights)
    assert small < 0.15 * 4 * sum(weight.numel() for weight in weights)
    sequences = random_sequences([(9, 25)])
    packed = collate(sequences, [0])
    with torch.no_grad():
        off = (whole(packed).logprobs_N - quantised(packed).logprobs_N).abs()
    assert 1e-3 < float(off.mean()) < 1.5


@pytest.mark.parametrize("backend", ["torchtune", "transformers"])
def test_steps_on_a_quantised_base_go_on_from_their_files(backend: Backend, qwen3: Path, tmp_path: Path) -> None:
    setup = setup_of(qwen3, tmp_path, backend=backend, quantise="nf4")
    batches = [samples_of(qwen3, n) for n in (1, 2)]
    runner = StepRunner(setup)
    first = completed(runner.train(step_of(batches[0], 1, recipe=DECOUPLED), ignore_status, never))
    second = completed(runner.train(step_of(batches[1], 2, first.version, recipe=DECOUPLED), ignore_status, never))
    again = StepRunner(setup)
    resumed = completed(again.train(step_of(batches[1], 2, first.version, recipe=DECOUPLED), ignore_status, never))
    assert resumed.version == second.version
    assert second.version.sha256 != first.version.sha256


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"quantise": "nf4"}, "trainer's base model"), ({"engines_quantised": True}, "engines' model")],
)
def test_without_a_decoupled_ratio_quantised_weights_are_refused(
    setting: dict[str, object], said: str, qwen3: Path, tmp_path: Path
) -> None:
    runner = StepRunner(setup_of(qwen3, tmp_path, **setting))
    with pytest.raises(RecipeRejected, match=rf"{said} is quantised.*recipe set.*training resume") as raised:
        runner.train(step_of(samples_of(qwen3, 1), 1), ignore_status, never)
    assert raised.value.field == "train.loss.correction"
