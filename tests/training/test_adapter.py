"""Adapter directories: PEFT reads them, they are written atomically, and named by their content."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from clawloop.core.adapters.directory import adapter_sha256, check_version
from clawloop.core.errors import AdapterUnusable
from clawloop.training.adapters.files import (
    Adapter,
    BaseIdentity,
    adapter_files,
    read_adapter,
    remove_unfinished,
    write_version,
)
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import PROJECTIONS, LoraShape, PolicyModel, adapter_tensors, set_adapter
from tests.training.tiny import all_logits, random_ids, reference_model, save_checkpoint, shake_adapter

CPU = torch.device("cpu")


def load(path: Path, lora: LoraShape) -> PolicyModel:
    return load_model(path, lora, dtype=torch.float32, device=CPU)


def files_of(model: PolicyModel, base: Path) -> dict[str, bytes]:
    identity = BaseIdentity(name="tiny", fingerprint=BaseWeights(base).fingerprint())
    return adapter_files(Adapter(model.lora, adapter_tensors(model), identity))


@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2"])
@pytest.mark.parametrize("targets", [PROJECTIONS, ("q_proj", "down_proj")])
def test_peft_gives_the_same_logits_with_our_files(
    checkpoint: str, targets: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(checkpoint)
    model = load(base, LoraShape(rank=4, alpha=8.0, targets=targets))
    shake_adapter(model)
    written = write_version(tmp_path, 1, files_of(model, base))
    ids = random_ids(60)
    peft = PeftModel.from_pretrained(reference_model(base), str(written.path)).eval()
    with torch.no_grad():
        expected = peft(torch.tensor([ids])).logits[0]
        unchanged = reference_model(base)(torch.tensor([ids])).logits[0]
    assert (all_logits(model, ids) - expected).abs().max() < 1e-4
    assert (unchanged - expected).abs().max() > 0.05


def test_an_adapter_is_read_back_bit_for_bit(qwen3: Path, tmp_path: Path) -> None:
    lora = LoraShape(rank=4, alpha=8.0)
    model = load(qwen3, lora)
    shake_adapter(model)
    written = write_version(tmp_path, 1, files_of(model, qwen3))
    read = read_adapter(written.path)
    other = load(qwen3, lora)
    set_adapter(other, read.tensors)
    assert read.lora == lora
    for name, tensor in adapter_tensors(model).items():
        assert torch.equal(adapter_tensors(other)[name], tensor)


def test_a_version_is_named_by_its_content_and_readable_by_other_users(qwen3: Path, tmp_path: Path) -> None:
    model = load(qwen3, LoraShape(rank=4, alpha=8.0))
    before = os.umask(0o077)
    try:
        first = write_version(tmp_path / "a", 7, files_of(model, qwen3) | {"more": b"kept, not hashed"})
    finally:
        os.umask(before)
    again = write_version(tmp_path / "b", 7, files_of(model, qwen3))
    shake_adapter(model)
    other = write_version(tmp_path / "b", 8, files_of(model, qwen3))
    assert first.path.name == f"v7-{first.sha256[:12]}"
    assert first.sha256 == again.sha256 == adapter_sha256(first.path)
    assert other.sha256 != first.sha256
    assert first.path.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in first.path.iterdir()} == {0o644}
    assert (first.path / "more").read_bytes() == b"kept, not hashed"


def test_writing_a_version_is_idempotent(qwen3: Path, tmp_path: Path) -> None:
    files = files_of(load(qwen3, LoraShape(rank=4, alpha=8.0)), qwen3)
    first = write_version(tmp_path, 1, files)
    inode = first.path.stat().st_ino
    assert write_version(tmp_path, 1, files) == first
    assert first.path.stat().st_ino == inode
    weights = first.path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(AdapterUnusable, match="expected"):
        write_version(tmp_path, 1, files)
    with pytest.raises(AdapterUnusable, match="expected"):
        check_version(first.path, first.sha256)


def test_a_write_that_fails_leaves_no_version(qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(load(qwen3, LoraShape(rank=4, alpha=8.0)), qwen3)
    synced: list[str] = []
    real = os.fsync

    def fails_at_the_fourth(descriptor: int) -> None:
        assert list(tmp_path.glob("v*")) == [], "it has a version's name before it is on the disk"
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        if len(synced) == 4:
            raise OSError(28, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_at_the_fourth)
        with pytest.raises(OSError, match="No space"):
            write_version(tmp_path, 1, files)
    assert set(synced[:3]) == files.keys()
    assert synced[3].startswith(".writing-")
    assert list(tmp_path.iterdir()) == []
    # A killed writer cannot tidy up; its directory has no version's name.
    (tmp_path / ".writing-v1-x").mkdir()
    assert remove_unfinished(tmp_path) == 1
    written = write_version(tmp_path, 1, files)
    assert [path.name for path in tmp_path.iterdir()] == [written.path.name]


def test_an_adapter_of_another_base_model_is_refused(qwen3: Path, tmp_path: Path) -> None:
    model = load(qwen3, LoraShape(rank=4, alpha=8.0))
    written = write_version(tmp_path, 1, files_of(model, qwen3))
    other = BaseWeights(save_checkpoint(tmp_path / "other", seed=1)).fingerprint()
    with pytest.raises(AdapterUnusable, match="another tiny"):
        read_adapter(written.path, base=BaseIdentity(name="tiny", fingerprint=other))
    (written.path / "base_model.json").unlink()
    with pytest.raises(AdapterUnusable, match="unknown base model"):
        read_adapter(written.path, base=BaseIdentity(name="tiny", fingerprint=other))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "not plain LoRA: use_dora"),
        ({"peft_type": "LOHA"}, "not plain LoRA: LOHA"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"target_modules": ["q_proj"]}, "tensors are of no target"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
        ({"r": None}, "damaged"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(
    changes: dict[str, object], message: str, qwen3: Path, tmp_path: Path
) -> None:
    model = load(qwen3, LoraShape(rank=4, alpha=8.0))
    path = write_version(tmp_path, 1, files_of(model, qwen3)).path
    config = path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(AdapterUnusable, match=message):
        read_adapter(path)


def test_tensors_of_another_shape_are_refused(qwen3: Path) -> None:
    model = load(qwen3, LoraShape(rank=4, alpha=8.0))
    other = adapter_tensors(load(qwen3, LoraShape(rank=2, alpha=8.0)))
    with pytest.raises(AdapterUnusable, match=r"\[2, 80\] instead of \[4, 80\]|instead of"):
        set_adapter(model, other)
