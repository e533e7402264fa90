"""A version's directory: adapter, optimiser state and random state.

Everything that a later step depends on is saved, so the same batch on the same version gives the same adapter, bit for
bit, in one CPU process. Under FSDP every rank calls these functions; the files hold unsharded tensors and do not depend
on the number of ranks. The database, not the directory, knows whether a version was committed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from clawloop.adapters.digest import check_version, read_adapter_file
from clawloop.errors import AdapterUnusable
from clawloop.training.adapters.files import (
    Adapter,
    BaseIdentity,
    WrittenVersion,
    adapter_files,
    read_adapter,
    write_version,
)
from clawloop.training.model.adapter import adapter_tensors, full_tensor, reset_adapter, set_adapter, shard_like
from clawloop.training.model.port import PolicyModel

STATE_FILE = "training_state.safetensors"
BROUGHT_FILE = "brought.json"
"""Beside an adapter that was made elsewhere: the optimiser has no state yet."""
_DIGEST_FILE = "training_state.sha256"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def begin(model: PolicyModel, optimizer: torch.optim.Optimizer, *, seed: int = 0) -> None:
    """Sets the state of version 0: a fresh adapter, an optimiser without state, and a seeded random generator."""
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
    """Writes the step's result as a version's directory, atomically.

    Args:
        parent: the policy's directory.
        version: the new version's number.
        model, optimizer: after the step.
        base: identity of the base model.
        writes: False on all ranks but the first: they take part in the collectives and get None.
    """
    tensors = adapter_tensors(model)
    state = _state(model, optimizer)
    if not writes:
        return None
    content = save(state, metadata={"format": "pt"})
    files = adapter_files(Adapter(model.lora, tensors, base))
    digest = hashlib.sha256(content).hexdigest().encode()
    return write_version(parent, version, files | {STATE_FILE: content, _DIGEST_FILE: digest})


def resume(path: Path, sha256: str, model: PolicyModel, optimizer: torch.optim.Optimizer, base: BaseIdentity) -> None:
    """Restores model, optimiser and random state of a version.

    Raises:
        AdapterUnusable: the directory's hash is not `sha256`, or base model or LoRA shape differ.
        AdapterUnreadable
    """
    check_version(path, sha256)
    adapter = read_adapter(path, base=base)
    if adapter.lora != model.lora:
        raise AdapterUnusable(f"{path} is {adapter.lora}, the recipe asks for {model.lora}")
    is_brought = (path / BROUGHT_FILE).exists()
    state = {} if is_brought else _read_state(path)
    set_adapter(model, adapter.tensors)
    optimizer.state.clear()
    if is_brought:
        torch.manual_seed(0)
        return
    for name, parameter in model.adapter_parameters().items():
        moments = {moment: state[f"{moment}/{name}"] for moment in _MOMENTS}
        optimizer.state[parameter] = {
            # AdamW keeps its step count on the CPU.
            moment: tensor if moment == "step" else shard_like(parameter, tensor.to(parameter.device))
            for moment, tensor in moments.items()
        }
    torch.set_rng_state(state["rng/cpu"])
    if torch.cuda.is_available() and "rng/cuda" in state:
        torch.cuda.set_rng_state(state["rng/cuda"])


def _state(model: PolicyModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, parameter in model.adapter_parameters().items():
        own = optimizer.state[parameter]
        for moment in _MOMENTS:
            state[f"{moment}/{name}"] = full_tensor(own[moment].detach()).cpu().contiguous()
    state["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state["rng/cuda"] = torch.cuda.get_rng_state()
    return state


def _read_state(path: Path) -> dict[str, Tensor]:
    try:
        content = read_adapter_file(path / STATE_FILE)
        digest = read_adapter_file(path / _DIGEST_FILE)
        state = load(content)
    except (AdapterUnusable, SafetensorError) as error:
        raise AdapterUnusable(f"{path} has no readable training state: {error}") from error
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise AdapterUnusable(f"{path} has a damaged training state")
    return state
