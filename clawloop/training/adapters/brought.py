"""Adapters that were made elsewhere: checked against the base model, and written as a policy's first version."""

from __future__ import annotations

from pathlib import Path

import torch

from clawloop.core.contracts.training import BroughtAdapter
from clawloop.core.errors import AdapterUnusable
from clawloop.training.adapters.files import (
    BROUGHT_FILE,
    Adapter,
    BaseIdentity,
    adapter_files,
    read_adapter,
    write_version,
)
from clawloop.training.adapters.merge import adapted_weights
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.checkpoint import read_family
from clawloop.training.model.port import PROJECTIONS


def bring_adapter(source: Path, base: Path, name: str, adapters: Path, policy: str) -> BroughtAdapter:
    """Write an adapter as version 1 of a policy.

    Args:
        source: its directory, in PEFT's format.
        base: folder of the base model; name: as engines serve it.
        adapters: of all versions.

    Raises:
        AdapterUnusable: it is no plain LoRA on the seven projections of this base model; the message names the field.
        AdapterUnreadable
        ModelUnsupported: the base model cannot be read.
    """
    read = read_adapter(source)
    weights = BaseWeights(base)
    identity = BaseIdentity(name=name, fingerprint=weights.fingerprint())
    if read.base is not None and read.base.fingerprint != identity.fingerprint:
        raise AdapterUnusable(f"{source}/base_model.json: it was trained on another {read.base.name} than {base}")
    if lacking := [one for one in PROJECTIONS if one not in read.lora.targets]:
        raise AdapterUnusable(
            f"{source}/adapter_config.json: target_modules: {', '.join(lacking)} lacking: a policy learns in all of"
            f" {', '.join(PROJECTIONS)}"
        )
    _check_shapes(source, read, base, weights)
    files = adapter_files(Adapter(read.lora, read.tensors, identity))
    written = write_version(adapters / policy, 1, files | {BROUGHT_FILE: b"{}\n"})
    path = written.path.relative_to(adapters).as_posix()
    return BroughtAdapter(path, written.sha256, read.lora.rank, read.lora.alpha)


def _check_shapes(source: Path, adapter: Adapter, base: Path, weights: BaseWeights) -> None:
    """
    Raises:
        AdapterUnusable: a tensor has no place in the base model, or another shape than there.
    """
    halves = adapted_weights(adapter, read_family(base), weights)
    known = {f"{half}.lora_{letter}.weight" for half in halves.values() for letter in "AB"}
    if odd := sorted(set(adapter.tensors) ^ known):
        raise AdapterUnusable(f"{source}: {odd[0]} is lacking, or has no other half")
    layers = {target: sum(f".{target}." in name for name in adapter.tensors) for target in PROJECTIONS}
    if len(set(layers.values())) > 1:
        least = min(layers, key=lambda target: layers[target])
        raise AdapterUnusable(f"{source}: {least} has an adapter in fewer layers than others: it must have one in all")
    for weight_name, weight in weights.read(halves, torch.device("cpu")):
        half, (rows, columns) = halves[weight_name], weight.shape
        for letter, wanted in (("A", (adapter.lora.rank, columns)), ("B", (rows, adapter.lora.rank))):
            found = tuple(adapter.tensors[f"{half}.lora_{letter}.weight"].shape)
            if found != wanted:
                raise AdapterUnusable(
                    f"{source}: {half}.lora_{letter} has the shape {found}, and the base model with r ="
                    f" {adapter.lora.rank} needs {wanted}: it is of another base model"
                )
