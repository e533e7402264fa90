"""Random adapters of the tiny model, and a model that computes the log-probs an engine should give with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from clawloop.core.contracts.training import VersionRef
from clawloop.training.adapters.files import Adapter, BaseIdentity, adapter_files, read_adapter, write_version
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel, adapter_tensors, reset_adapter, set_adapter
from clawloop.training.packing import TokenSequence, collate

LORA = LoraShape(rank=4, alpha=8.0)


def random_versions(model: Path, adapters: Path, numbers: Sequence[int], lora: LoraShape = LORA) -> list[VersionRef]:
    """Write versions of policy `default`, each with a different random adapter."""
    policy = load_policy(model, lora)
    base = BaseIdentity(name=model.name, fingerprint=BaseWeights(model).fingerprint())
    versions = []
    for n in numbers:
        generator = torch.Generator().manual_seed(n)
        with torch.no_grad():
            for parameter in policy.adapter_parameters().values():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        files = adapter_files(Adapter(lora, adapter_tensors(policy), base))
        written = write_version(adapters / "default", n, files)
        path = str(written.path.relative_to(adapters))
        versions.append(VersionRef("default", n, n - 1, path, written.sha256))
    return versions


def load_policy(model: Path, lora: LoraShape = LORA, dtype: torch.dtype = torch.float32) -> PolicyModel:
    return load_model(model, lora, dtype=dtype, device=torch.device("cpu"))


def apply_adapter(policy: PolicyModel, directory: Path | None) -> None:
    """Set the model's adapter to that of a version's directory; None: the base model."""
    if directory is None:
        reset_adapter(policy, seed=0)
    else:
        set_adapter(policy, read_adapter(directory).tensors)


def logprobs(policy: PolicyModel, prompt: Sequence[int], response: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-prob of each response token, in float32; shape (T,)."""
    sequence = TokenSequence("turn", list(prompt), list(response), temperature)
    with torch.no_grad():
        logprobs_T: torch.Tensor = policy(collate([sequence], [0])).logprobs_N
        return logprobs_T
