"""A merged checkpoint is a standard one with the logits of base and adapter together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from clawloop.core.errors import AdapterUnusable, SetupError
from clawloop.training.adapters import merge as merge_module
from clawloop.training.adapters.files import Adapter, BaseIdentity, adapter_files, write_version
from clawloop.training.adapters.merge import merge
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, adapter_tensors
from tests.training.tiny import (
    Family,
    all_logits,
    random_ids,
    reference_model,
    save_checkpoint,
    shake_adapter,
)


def base_and_adapter(tmp_path: Path, family: Family, *, tied: bool, shard_size: str) -> tuple[Path, Path]:
    base = save_checkpoint(tmp_path / "base", family, tied=tied, shard_size=shard_size)
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "training_args.bin").write_bytes(b"not part of a model")
    model = load_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(model)
    identity = BaseIdentity(name="tiny", fingerprint=BaseWeights(base).fingerprint())
    files = adapter_files(Adapter(model.lora, adapter_tensors(model), identity))
    return base, write_version(tmp_path / "versions", 1, files).path


@pytest.mark.parametrize(("family", "tied", "shard_size"), [("qwen3", True, "1GB"), ("qwen2", False, "100KB")])
def test_a_merged_checkpoint_has_the_same_logits_in_transformers(
    tmp_path: Path, family: Family, tied: bool, shard_size: str
) -> None:
    base, adapter = base_and_adapter(tmp_path, family, tied=tied, shard_size=shard_size)
    out = tmp_path / "merged"
    report = merge(base, adapter, out)
    assert report.logit_error < 0.03 < 0.3 < report.logit_change
    model = load_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(model)
    ids = random_ids(60)
    expected = all_logits(model, ids)
    with torch.no_grad():
        found = reference_model(out)(torch.tensor([ids])).logits[0]
    assert (found - expected).norm() / expected.norm() < 0.03
    assert BaseWeights(out).names == BaseWeights(base).names
    stored = BaseWeights(out).read(BaseWeights(out).names, torch.device("cpu"))
    assert {tensor.dtype for _, tensor in stored} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    copied = {path.name for path in out.iterdir() if "safetensors" not in path.name}
    assert copied == {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    assert {path.stat().st_mode & 0o444 for path in out.iterdir()} == {0o444}


def test_a_wrong_merge_is_detected_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = base_and_adapter(tmp_path, "qwen3", tied=True, shard_size="1GB")
    right = merge_module.merged_weight

    def without_scale(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return right(weight, a, b, 1.0)

    monkeypatch.setattr(merge_module, "merged_weight", without_scale)
    with pytest.raises(AdapterUnusable, match="merged logits differ"):
        merge(base, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_merge_needs_the_adapters_base_and_a_new_directory(tmp_path: Path) -> None:
    base, adapter = base_and_adapter(tmp_path, "qwen3", tied=True, shard_size="1GB")
    with pytest.raises(SetupError, match="exists"):
        merge(base, adapter, base)
    other = save_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(AdapterUnusable, match="another tiny"):
        merge(other, adapter, tmp_path / "merged")
