"""vLLM on a GPU: its log-probs at each precision, its memory beside the plan's, its start beside a trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from clawloop.app.layout.memory import Process, Role
from clawloop.app.local.checks import choose_port
from clawloop.app.local.machine import Device
from clawloop.app.local.model_layout import ModelOptions, lay_out
from clawloop.app.local.services.vllm import EngineOptions, launch, read_model
from clawloop.core.recipes.recipe import Recipe
from clawloop.training.adapters.files import Adapter, BaseIdentity, adapter_files, write_version
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, adapter_tensors
from clawloop.training.packing import TokenSequence, collate
from tests.lone_engine import MIB, Start, running_engine, running_launch, used_on_gpu
from tests.quantised_copy import Method, write_copy, write_unpacked
from tests.random_model import QWEN3_27M, write_random_model
from tests.training.tiny import shake_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here: `make setup DEVICE=cuda`"),
    pytest.mark.timeout(1800),
]


PROMPT, RESPONSE, DOCUMENTS = 192, 64, 4


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine's precision.

    Args:
        copy: the quantised copy that it serves; None: the model itself.
        further: arguments of vLLM's own.
    """

    name: str
    copy: Method | None = None
    further: tuple[str, ...] = ()


KINDS = (
    Kind("bfloat16"),
    Kind("awq", copy="awq"),
    Kind("gptq", copy="gptq"),
    Kind("fp8", further=("--quantization", "fp8")),  # rounded as it is loaded
)


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    ids: list[list[int]] = torch.randint(
        QWEN3_27M["vocab_size"], (DOCUMENTS, PROMPT + RESPONSE), generator=generator
    ).tolist()
    return ids


def random_adapter(model: Path, folder: Path) -> Path:
    """A version's folder; it moves log-probs about as far as training does."""
    policy = load_model(model, LoraShape(), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(policy, 0.03)
    base = BaseIdentity(name=model.name, fingerprint=BaseWeights(model).fingerprint())
    return write_version(folder, 1, adapter_files(Adapter(LoraShape(), adapter_tensors(policy), base))).path


def of_trainer(model: Path, dtype: torch.dtype) -> list[float]:
    """Log-probs of the documents' last tokens by the base model."""
    torch.manual_seed(0)
    device = torch.device("cuda")
    loaded = load_model(model, LoraShape(), dtype=dtype, device=device, max_tokens=1024)
    sequences = [TokenSequence(str(n), row[:PROMPT], row[PROMPT:], 1.0) for n, row in enumerate(documents())]
    found: list[float] = []
    with torch.no_grad():
        for document in range(DOCUMENTS):
            scored = loaded(collate(sequences, [document], share_prefixes=False).to(device))
            found += scored.logprobs_N.float().tolist()
    return found


def of_engine(kind: Kind, model: Path, adapter: Path, folder: Path) -> list[float]:
    """The same by vLLM, which also loads an adapter and answers by it."""
    served = model if kind.copy is None else write_copy(model, folder / f"{kind.copy}-served", kind.copy)
    with running_engine(Start(served, cache=128 * MIB, further=kind.further), folder / "vllm.log") as engine:
        found = [value for ids in documents() for value in engine.score(ids)[-RESPONSE:]]
        engine.load("one", adapter)
        adapted = engine.score(documents()[0], "one")[-RESPONSE:]
    assert off(adapted, found[:RESPONSE]) > 1e-3
    return found


def off(found: list[float], exact: list[float]) -> float:
    return float((torch.tensor(found) - torch.tensor(exact)).abs().mean())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_engine_has_the_log_probs_of_its_weights(kind: Kind, tmp_path: Path) -> None:
    model = write_random_model(tmp_path / "model", QWEN3_27M)
    adapter = random_adapter(model, tmp_path / "adapters")
    exact = of_trainer(model, torch.float32)
    rounding = off(of_trainer(model, torch.bfloat16), exact)
    four_bits = of_trainer(write_unpacked(model, tmp_path / "unpacked", "awq"), torch.float32)
    found = of_engine(kind, model, adapter, tmp_path)
    if kind.copy is not None:
        exact = of_trainer(write_unpacked(model, tmp_path / kind.copy, kind.copy), torch.float32)
        # Scales are rounded to bfloat16, and products of 4-bit weights in another order.
        assert off(found, exact) < 3 * rounding
    elif kind.name == "fp8":
        assert rounding < off(found, exact) < off(four_bits, exact)
    else:
        assert off(found, exact) < 1.5 * rounding


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
