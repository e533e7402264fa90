"""A step resumed from the disk is the step that was never interrupted, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clawloop.core.errors import AdapterUnusable
from clawloop.core.recipes.recipe import Optimiser, Train
from clawloop.training.adapters.files import BaseIdentity, WrittenVersion, begin, resume, save_version
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel
from clawloop.training.packing import Limits
from clawloop.training.step import make_optimizer, train_step
from tests.training.tiny import VOCAB, random_batch, save_checkpoint

LIMITS = Limits(budget_tokens=60, max_tokens=256, vocab_size=VOCAB)
RECIPE = Train(optimiser=Optimiser(lr=1e-3, epochs=2))


def fresh(base: Path, lora: LoraShape | None = None) -> tuple[PolicyModel, torch.optim.Optimizer]:
    model = load_model(base, lora or LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    return model, make_optimizer(model, RECIPE.optimiser)


def identity(base: Path) -> BaseIdentity:
    return BaseIdentity(name="tiny", fingerprint=BaseWeights(base).fingerprint())


def run_steps(
    base: Path,
    parent: Path,
    first: int,
    last: int,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
) -> list[WrittenVersion]:
    """Steps whose batches depend on their number only."""
    clean, _ = fresh(base)
    versions = []
    for version in range(first, last + 1):
        batch = random_batch(clean, hints=True, version=0, seed=version)
        train_step(model, optimizer, batch, RECIPE, LIMITS, parent=version - 1)
        written = save_version(parent, version, model, optimizer, identity(base))
        assert written is not None
        versions.append(written)
    return versions


@pytest.mark.parametrize("checkpoint", ["qwen3", "qwen2"])
def test_resumed_training_gives_the_same_hash_as_uninterrupted_training(
    checkpoint: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(checkpoint)
    model, optimizer = fresh(base)
    begin(model, optimizer)
    straight = run_steps(base, tmp_path / "straight", 1, 3, model, optimizer)

    model, optimizer = fresh(base)
    begin(model, optimizer)
    [first] = run_steps(base, tmp_path / "resumed", 1, 1, model, optimizer)
    # Another process: nothing of the first one's memory is left, and what is there is wrong.
    model, optimizer = fresh(base)
    run_steps(base, tmp_path / "lost", 9, 9, model, optimizer)
    torch.manual_seed(99)
    resume(first.path, first.sha256, model, optimizer, identity(base))
    resumed = run_steps(base, tmp_path / "resumed", 2, 3, model, optimizer)

    assert [v.sha256 for v in [first, *resumed]] == [v.sha256 for v in straight]
    assert len({v.sha256 for v in straight}) == 3
    for one, other in zip(straight, [first, *resumed], strict=True):
        assert {f.name: f.read_bytes() for f in one.path.iterdir()} == {
            f.name: f.read_bytes() for f in other.path.iterdir()
        }


def test_the_random_state_is_restored_with_the_version(qwen3: Path, tmp_path: Path) -> None:
    model, optimizer = fresh(qwen3)
    begin(model, optimizer, seed=5)
    torch.rand(3)
    [written] = run_steps(qwen3, tmp_path, 1, 1, model, optimizer)
    expected = torch.rand(4)
    torch.manual_seed(123)
    resume(written.path, written.sha256, model, optimizer, identity(qwen3))
    assert torch.equal(torch.rand(4), expected)


def test_a_fresh_adapter_does_not_change_the_base_model(qwen3: Path) -> None:
    model, optimizer = fresh(qwen3)
    other, _ = fresh(qwen3)
    begin(model, optimizer, seed=0)
    begin(other, optimizer, seed=1)
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"
    a, b = (m.adapter_parameters()[name] for m in (model, other))
    assert not torch.equal(a, b)
    assert all(not p.any() for n, p in model.adapter_parameters().items() if "lora_B" in n)


def test_what_cannot_be_resumed_is_refused(qwen3: Path, tmp_path: Path) -> None:
    model, optimizer = fresh(qwen3)
    begin(model, optimizer)
    [written] = run_steps(qwen3, tmp_path / "v", 1, 1, model, optimizer)
    with pytest.raises(AdapterUnusable, match=r"holds .* expected 0000"):
        resume(written.path, "0" * 64, model, optimizer, identity(qwen3))
    other = identity(save_checkpoint(tmp_path / "other", seed=1))
    with pytest.raises(AdapterUnusable, match="another tiny"):
        resume(written.path, written.sha256, model, optimizer, other)
    wider, wider_optimizer = fresh(qwen3, LoraShape(rank=8, alpha=8.0))
    with pytest.raises(AdapterUnusable, match=r"rank=4.*the recipe asks for.*rank=8"):
        resume(written.path, written.sha256, wider, wider_optimizer, identity(qwen3))
    state = written.path / "training_state.safetensors"
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    with pytest.raises(AdapterUnusable, match="damaged training state"):
        resume(written.path, written.sha256, model, optimizer, identity(qwen3))
    state.unlink()
    with pytest.raises(AdapterUnusable, match="no readable training state"):
        resume(written.path, written.sha256, model, optimizer, identity(qwen3))
