"""What a step starts from and leaves behind: adapter, optimiser and random state in one version's directory.

Knows nothing about losses or the ledger; the ledger says which version was committed. Everything a later step
depends on is saved, so the same batch on the same version gives the same adapter, bit for bit, on one CPU
process. Under FSDP every rank calls these functions; the files hold whole tensors and do not depend on how
many ranks there were.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from clawloop.adapters.digest import check_version
from clawloop.errors import AdapterUnusable
from clawloop.training.adapters.files import (
    Adapter,
    BaseIdentity,
    WrittenVersion,
    adapter_files,
    read_adapter,
    write_version,
)
from clawloop.training.model.architecture import adapter_names
from clawloop.training.model.decoder import PolicyModel
from clawloop.training.model.loading import adapter_tensors, reset_adapter, set_adapter, sharded, whole

STATE_FILE = "training_state.safetensors"
_DIGEST_FILE = "training_state.sha256"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def begin(model: PolicyModel, optimizer: torch.optim.Optimizer, *, seed: int = 0) -> None:
    """Start at version 0: a fresh adapter, an optimiser without history, and seeded random state."""
    reset_adapter(model, seed)
    optimizer.state.clear()
    torch.manual_seed(seed)


def save_version(
    parent: Path,
    version: int,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    base: BaseIdentity,
    *,
    writes: bool = True,
) -> WrittenVersion | None:
    """Save what this step made, all or nothing.

    Args:
        parent: the policy's directory of versions.
        version: the new version's number.
        model, optimizer: after the step.
        base: the model's base.
        writes: False on all ranks but the first: they take part and get None.
    """
    tensors = adapter_tensors(model)
    state = _state(model, optimizer)
    if not writes:
        return None
    content = save(state, metadata={"format": "pt"})
    files = adapter_files(Adapter(model.lora, tensors, base), model.architecture)
    digest = hashlib.sha256(content).hexdigest().encode()
    return write_version(parent, version, files | {STATE_FILE: content, _DIGEST_FILE: digest})


def resume(path: Path, sha256: str, model: PolicyModel, optimizer: torch.optim.Optimizer, base: BaseIdentity) -> None:
    """Put model, optimiser and random state where this version left them.

    Raises:
        AdapterUnusable: the directory does not hold what the ledger says; another base model, or shape.
    """
    check_version(path, sha256)
    adapter = read_adapter(path, model.architecture, base=base)
    if adapter.lora != model.lora:
        raise AdapterUnusable(f"{path} is {adapter.lora}, the recipe asks for {model.lora}")
    state = _read_state(path)
    set_adapter(model, adapter.tensors)
    names = adapter_names(model.architecture, model.lora.targets)
    optimizer.state.clear()
    for ours, parameter in model.adapter_parameters().items():
        moments = {moment: state[f"{moment}/{names[ours]}"] for moment in _MOMENTS}
        optimizer.state[parameter] = {
            # AdamW keeps its count of steps on the CPU.
            moment: tensor if moment == "step" else sharded(parameter, tensor.to(parameter.device))
            for moment, tensor in moments.items()
        }
    torch.set_rng_state(state["rng/cpu"])
    if torch.cuda.is_available() and "rng/cuda" in state:
        torch.cuda.set_rng_state(state["rng/cuda"])


def _state(model: PolicyModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = adapter_names(model.architecture, model.lora.targets)
    state: dict[str, Tensor] = {}
    for ours, parameter in model.adapter_parameters().items():
        held = optimizer.state[parameter]
        for moment in _MOMENTS:
            state[f"{moment}/{names[ours]}"] = whole(held[moment].detach()).cpu().contiguous()
    state["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["rng/cuda"] = torch.cuda.get_rng_state()
    return state


def _read_state(path: Path) -> dict[str, Tensor]:
    try:
        content = (path / STATE_FILE).read_bytes()
        digest = (path / _DIGEST_FILE).read_text()
        state = load(content)
    except (OSError, SafetensorError) as error:
        raise AdapterUnusable(f"{path} has no training state that can be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != digest:
        raise AdapterUnusable(f"{path} has a training state that is damaged")
    return state
