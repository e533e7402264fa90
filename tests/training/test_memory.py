"""Peak memory of a step's tensors, measured: it grows with the response, not with prompt times vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from clawloop.core.contracts.training import BatchSample
from clawloop.core.recipes.recipe import Distillation, Loss, Optimiser, Train
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape
from clawloop.training.packing import Limits
from clawloop.training.step import make_optimizer, train_step
from tests.training.methods import train_part
from tests.training.tiny import sample_id, save_checkpoint

VOCAB = 8192
LOGITS = VOCAB * 4  # bytes of one position's logits
METHODS = {
    "combined": Train(optimiser=Optimiser(lr=0.0001)),
    "topk": Train(loss=Loss(policy_gradient=0, distillation=1.0), distillation=Distillation(top_k=50)),
    "demo": train_part("demo", lr=0.0001, epochs=1),  # both parts, the forward divergence, and the teacher's ids
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("wide"), vocab=VOCAB, positions=2048)


def peak_bytes(folder: Path, work: Callable[[], object]) -> int:
    """The most that tensors held at once, beyond those held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    found.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: float(e["ts"]))
    before: int = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    peak: int = max(event["args"]["Total Allocated"] for event in changes)
    return peak - before


def peak_of_step(base: Path, folder: Path, recipe: Train, prompt: int, response: int) -> int:
    model = load_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (prompt + response,), generator=generator).tolist()
    sample = BatchSample(
        sample_id=sample_id(0),
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        logprobs=[-9.0] * response,
        temperature=1.0,
        version=0,
        reward=1.0,
        hinted_prompts={0: [*ids[:prompt], *ids[:8]]},
    )
    optimizer = make_optimizer(model, recipe.optimiser)
    limits = Limits(4096, 2048, VOCAB)
    return peak_bytes(folder, lambda: train_step(model, optimizer, [sample], recipe, limits))


@pytest.mark.parametrize("method", METHODS)
def test_peak_memory_grows_with_the_response_and_not_with_prompt_times_vocabulary(
    method: str, base: Path, tmp_path: Path
) -> None:
    recipe = METHODS[method]
    short = peak_of_step(base, tmp_path, recipe, prompt=100, response=40)
    long_prompt = peak_of_step(base, tmp_path, recipe, prompt=1100, response=40)
    long_response = peak_of_step(base, tmp_path, recipe, prompt=100, response=140)
    # A thousand prompt tokens cost less than the logits of a hundred positions; a hundred response tokens more.
    assert long_prompt - short < 100 * LOGITS
    assert long_response - short > 100 * LOGITS
