"""A policy begins from an adapter that PEFT wrote: checked against the base model, and trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from clawloop.core.adapters.directory import check_version
from clawloop.core.errors import AdapterUnusable
from clawloop.training.adapters.brought import bring_adapter
from clawloop.training.adapters.files import BaseIdentity, read_adapter, resume, save_version
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.port import LoraShape
from clawloop.training.step import train_step
from tests.training.test_checkpoint import LIMITS, RECIPE, fresh, identity
from tests.training.tiny import random_batch, reference_model, save_checkpoint

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base model, and an adapter of it that PEFT wrote."""
    folder = tmp_path_factory.mktemp("brought")
    base = save_checkpoint(folder / "base")
    return base, by_peft(base, folder / "adapter", PROJECTIONS)


def by_peft(base: Path, folder: Path, projections: Sequence[str]) -> Path:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(projections), task_type="CAUSAL_LM")
    model = get_peft_model(reference_model(base), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(str(folder))
    return folder


def changed(adapter: Path, folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy with its config and tensors changed."""
    config, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    change(config, tensors)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_it_becomes_version_1_with_the_base_model_it_fits(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    brought = bring_adapter(adapter, base, "tiny", tmp_path / "adapters", "mine")
    written = tmp_path / "adapters" / brought.path
    check_version(written, brought.sha256)
    read = read_adapter(written, base=BaseIdentity(name="tiny", fingerprint=BaseWeights(base).fingerprint()))
    assert (read.lora.rank, read.lora.alpha) == (brought.rank, brought.alpha)
    before = load_file(adapter / "adapter_model.safetensors")
    assert all(torch.equal(read.tensors[name], tensor.float()) for name, tensor in before.items())


def test_training_goes_on_from_it(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = parts
    adapters = tmp_path / "adapters"
    brought = bring_adapter(adapter, base, "tiny", adapters, "mine")
    model, optimizer = fresh(base, LoraShape(rank=brought.rank, alpha=brought.alpha))
    resume(adapters / brought.path, brought.sha256, model, optimizer, identity(base))
    train_step(model, optimizer, random_batch(model, version=1), RECIPE, LIMITS, parent=1)
    made = save_version(adapters / "mine", 2, model, optimizer, identity(base))
    assert made is not None
    resume(made.path, made.sha256, *fresh(base, LoraShape(rank=brought.rank, alpha=brought.alpha)), identity(base))
    before, after = read_adapter(adapters / brought.path).tensors, read_adapter(made.path).tensors
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_an_adapter_of_fewer_projections_is_refused_by_their_names(parts: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = parts
    source = by_peft(base, tmp_path / "mine", ("q_proj", "v_proj"))
    lacking = "adapter_config.json: target_modules: k_proj, o_proj, gate_proj, up_proj, down_proj lacking"
    with pytest.raises(AdapterUnusable, match=lacking):
        bring_adapter(source, base, "tiny", tmp_path / "adapters", "mine")


def wider(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    name = next(name for name in sorted(tensors) if name.endswith("lora_A.weight"))
    tensors[name] = torch.zeros(tensors[name].shape[0], tensors[name].shape[1] + 8)


def half(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    del tensors[next(name for name in sorted(tensors) if name.endswith("lora_B.weight"))]


def other_layer(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if ".layers.0." in name]:
        tensors[name.replace(".layers.0.", ".layers.99.")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (wider, r"lora_A has the shape \(\d+, \d+\), and the base model with r = \d+ needs"),
        (half, r"lora_B.weight is lacking, or has no other half"),
        (other_layer, r"the adapter changes model.layers.99.* which the base model does not have"),
        (lambda config, tensors: config.update(use_dora=True), "is not plain LoRA: use_dora"),
        (lambda config, tensors: config.update(layers_to_transform=[0]), "is not plain LoRA: layers_to_transform"),
        (lambda config, tensors: config.update(r="x"), "adapter_config|damaged.*r"),
        (lambda config, tensors: config.update(r=config["r"] * 2), "with r = "),
    ],
)
def test_what_does_not_fit_is_named(
    parts: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], why: str
) -> None:
    base, adapter = parts
    source = changed(adapter, tmp_path / "mine", change)
    with pytest.raises(AdapterUnusable, match=f"(?s){why}"):
        bring_adapter(source, base, "tiny", tmp_path / "adapters", "mine")
    assert not (tmp_path / "adapters").exists()
