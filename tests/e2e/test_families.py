"""Base model and adapter of other families: vLLM's log-probs beside the trainer's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clawloop.training.model.port import LoraShape
from tests.e2e.adapters import apply_adapter, load_policy, logprobs, random_versions
from tests.e2e.sampling import MARK, TEMPERATURE
from tests.training.families import save_family

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

LORA = LoraShape(rank=4, alpha=8.0)
PROMPTS = [[100 + (7 * n + place) % 300 for place in range(12 + n)] for n in range(4)]
# A head of 32 features is the least that vLLM's attention on a CPU takes.
FAMILIES: dict[str, dict[str, int]] = {
    "qwen2": {"head_dim": 32},
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "gemma4_text": {"head_dim": 32, "global_head_dim": 32},
    # Its linear attention on a CPU takes heads of 128 features, in bfloat16.
    "qwen3_5_text": {"head_dim": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
BFLOAT16 = {"qwen3_5_text"}
# Importing Qwen3.5 imports torchvision, of which PyPI has CUDA builds alone.
STAND_IN = Path(__file__).with_name("stand_in")


@dataclass(frozen=True)
class Work:
    """What is asked of vLLM; see `tests.e2e.sampling`."""

    model: str
    dtype: str
    adapter: str
    prompts: list[list[int]]


@dataclass(frozen=True)
class Sampled:
    """
    Attributes:
        model: what the trainer loads.
        adapter: a version's folder.
        answers: of vLLM.
    """

    model: Path
    adapter: Path
    answers: list[dict[str, Any]]

    def off(self, *, adapted: bool, ignored: bool = False) -> torch.Tensor:
        """How far the trainer's log-probs are from vLLM's, of all tokens.

        Args:
            adapted: of the replies by the adapter.
            ignored: the trainer has no adapter all the same.
        """
        found = [answer for answer in self.answers if answer["adapted"] == adapted]
        assert len(found) == len(PROMPTS)
        by_vllm = torch.tensor([logprob for answer in found for logprob in answer["logprobs"]])
        return (self._by_trainer(adapted, ignored) - by_vllm).abs()

    def rounding(self, *, adapted: bool) -> torch.Tensor:
        """How far the trainer's log-probs in bfloat16 are from its own in float32, of the same tokens."""
        rounded = self._by_trainer(adapted, False, torch.bfloat16)
        return (rounded - self._by_trainer(adapted, False)).abs()

    def _by_trainer(self, adapted: bool, ignored: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        policy = load_policy(self.model, LORA, dtype)
        apply_adapter(policy, self.adapter if adapted and not ignored else None)
        answers = [answer for answer in self.answers if answer["adapted"] == adapted]
        return torch.cat([logprobs(policy, answer["prompt"], answer["tokens"], TEMPERATURE) for answer in answers])


@pytest.fixture(scope="module")
def sampled(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Sampled]:
    """By family, from one process."""
    folder = tmp_path_factory.mktemp("sampled")
    models, adapters = {}, {}
    for family in FAMILIES:
        models[family] = of_family(folder / family, family, tiny_model_path)
        [version] = random_versions(models[family], folder / f"{family}-adapters", [1], LORA)
        adapters[family] = folder / f"{family}-adapters" / version.path
    dtypes = {family: "bfloat16" if family in BFLOAT16 else "float32" for family in FAMILIES}
    work = [Work(str(models[family]), dtypes[family], str(adapters[family]), PROMPTS) for family in FAMILIES]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.sampling"],
        input=json.dumps([asdict(one) for one in work]),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(STAND_IN)},
    )
    found = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert len(found) == len(work), done.stdout[-2000:] + done.stderr[-6000:]
    return {
        family: Sampled(models[family], adapters[family], answers)
        for family, answers in zip(FAMILIES, found, strict=True)
    }


def of_family(folder: Path, family: str, tiny: Path) -> Path:
    """A random model of this family, with the tiny model's tokenizer."""
    vocabulary = json.loads((tiny / "config.json").read_text())["vocab_size"]
    sizes = FAMILIES[family] | {"vocab_size": vocabulary, "hidden_size": 128}
    if family == "gemma4_text":
        sizes["vocab_size_per_layer_input"] = vocabulary
    save_family(folder, family, **sizes)
    if family in BFLOAT16:  # as the engine rounds them
        weights = folder / "model.safetensors"
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(weights).items()}
        save_file(rounded, weights, {"format": "pt"})
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / file, folder / file)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_same_log_probs_in_vllm_and_in_the_trainer(
    family: str, sampled: Mapping[str, Sampled], capsys: pytest.CaptureFixture[str]
) -> None:
    found = sampled[family]
    base, adapted = found.off(adapted=False), found.off(adapted=True)
    moved = float(found.off(adapted=True, ignored=True).mean())
    with capsys.disabled():
        sys.stdout.write(f"\n{family}: off by {base.max():.1e}, adapter {adapted.max():.1e}; it moved {moved:.2f}\n")
    assert moved > 1e-2
    if family in BFLOAT16:
        rounding = float(found.rounding(adapted=False).mean()), float(found.rounding(adapted=True).mean())
        with capsys.disabled():
            means = f"{base.mean():.3f} and {adapted.mean():.3f}"
            sys.stdout.write(f"{family}: mean {means}, of rounding alone {rounding[0]:.3f} and {rounding[1]:.3f}\n")
        assert float(base.mean()) < 2 * rounding[0]
        assert float(adapted.mean()) < 2 * rounding[1]
        return
    # Measured: 5e-6 at most, with an adapter 7e-6, of Gemma 4 2e-4.
    assert float(base.max()) < 1e-4
    assert float(adapted.mean()) < 1e-4
    assert float(adapted.max()) < 2e-3
