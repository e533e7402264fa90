"""vLLM on a GPU: its log-probs at each precision, its memory beside the plan's, its start beside a trainer."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.low_precision import RESPONSE, SHAPE, documents_of, measure, write_adapter
from benchmarks.low_precision_engines import ON_GPU, EngineKind, measure_engine
from benchmarks.plan_memory_engine import running_launch, used_on_gpu
from benchmarks.quantised_copy import write_unpacked
from clawloop.layout.parts import Process, Role
from clawloop.local.checks import choose_port
from clawloop.local.machine import Device
from clawloop.local.model_layout import ModelOptions, lay_out
from clawloop.local.services.vllm import EngineOptions, launch, read_model
from clawloop.recipes.recipe import Recipe
from tests.random_model import write_random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: `make setup DEVICE=cuda`"),
    pytest.mark.timeout(1800),
]


def off(found: list[float], exact: list[float]) -> float:
    return float((torch.tensor(found) - torch.tensor(exact)).abs().mean())


@pytest.mark.parametrize("kind", ON_GPU, ids=lambda kind: kind.name)
def test_an_engine_has_the_log_probs_of_its_weights(kind: EngineKind, tmp_path: Path) -> None:
    device = torch.device("cuda")
    model = write_random_model(tmp_path / "model", SHAPE)
    adapter = write_adapter(model, tmp_path / "adapters")
    exact = measure(model, adapter, "torchtune", "float32", device).logprobs
    rounding = off(measure(model, adapter, "torchtune", "bfloat16", device).logprobs, exact)
    unpacked = write_unpacked(model, tmp_path / "unpacked", "awq")
    four_bits = measure(unpacked, adapter, "torchtune", "float32", device).logprobs
    own = tmp_path / "engine"
    own.mkdir()
    found = measure_engine(kind, model, adapter, own, documents_of(SHAPE["vocab_size"]), RESPONSE, gpu=True)
    assert not found.ended
    if kind.copy is not None:
        weights = write_unpacked(model, tmp_path / kind.copy, kind.copy)
        exact = measure(weights, adapter, "torchtune", "float32", device).logprobs
        # Scales are rounded to bfloat16, and products of 4-bit weights in another order.
        assert off(found.logprobs, exact) < 3 * rounding
    elif kind.name == "fp8":
        assert rounding < off(found.logprobs, exact) < off(four_bits, exact)
    else:
        assert off(found.logprobs, exact) < 1.5 * rounding


def planned(model: Path) -> tuple[Process, Process]:
    """The engine and the trainer that share the GPU."""
    options = ModelOptions(device=Device.CUDA, dtype="bfloat16", max_model_len=4096)
    layout = lay_out(options, model, Recipe(name="combined"), os.environ)
    roles = {process.role: process for process in layout.processes}
    return roles[Role.ENGINE], roles[Role.TRAINER]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="engine and trainer share a GPU where it is the only one")
def test_a_restarted_engine_fits_beside_a_resident_trainer_and_takes_what_was_planned(tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "qwen3-0.6b")
    facts = read_model(model)
    engine, trainer = planned(model)
    torch.zeros(1, device="cuda")  # CUDA's context of this process
    for start in ("alone", "beside the trainer"):
        # No less than the plan gives the trainer, and all but a GiB of what it does not give the engine.
        resident = used_on_gpu() if start == "alone" else 0
        left = max(trainer.bytes, torch.cuda.mem_get_info()[0] - engine.bytes - 2**30)
        held = torch.empty(0 if start == "alone" else left, dtype=torch.uint8, device="cuda")
        port = choose_port("vLLM", "127.0.0.1", 0, "")
        started = launch(facts, EngineOptions(port, engine.arguments, engine.environment), os.environ)
        with running_launch(started, port, facts.name, tmp_path / f"{start}.log") as running:
            running.ask()
            assert len(running.score(list(range(1, 65)))) == 63
            if start == "alone":
                assert used_on_gpu() - resident < 1.15 * engine.bytes
        del held
