"""The tensors of a Hugging Face checkpoint, in one safetensors file or several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clawloop.core.errors import ModelUnsupported

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Enough of each tensor to distinguish two fine-tunes without reading a whole checkpoint at every start.
_FINGERPRINT_ELEMENTS = 1024


class BaseWeights:
    """Reads a checkpoint's tensors one at a time.

    Args:
        checkpoint: directory with `model.safetensors`, or shards and their index.

    Raises:
        ModelUnsupported: there are no safetensors, or a shard is missing or damaged.
    """

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        try:
            if (checkpoint / _INDEX).exists():
                index = json.loads((checkpoint / _INDEX).read_text())
                self._file_of: dict[str, str] = dict(index["weight_map"])
            elif (checkpoint / _SINGLE).exists():
                with safe_open(checkpoint / _SINGLE, framework="pt") as file:
                    self._file_of = dict.fromkeys(file.keys(), _SINGLE)
            else:
                raise ModelUnsupported(f"{checkpoint} has neither {_SINGLE} nor {_INDEX}")
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelUnsupported(f"{checkpoint} cannot be read: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_of)

    def files(self) -> dict[str, list[str]]:
        """File name → names of its tensors, both sorted."""
        files: dict[str, list[str]] = {}
        for name, file in sorted(self._file_of.items()):
            files.setdefault(file, []).append(name)
        return dict(sorted(files.items()))

    def read(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yields these tensors on this device, in the dtype in which they are stored.

        Raises:
            ModelUnsupported: a tensor is missing, or a file cannot be read.
        """
        requested = set(names)
        if missing := sorted(requested - self.names):
            raise ModelUnsupported(f"{self._checkpoint} lacks {len(missing)} tensors, the first is {missing[0]}")
        try:
            for file_name, stored in self.files().items():
                if chosen := [name for name in stored if name in requested]:
                    path = self._checkpoint / file_name
                    with safe_open(path, framework="pt", device=str(device)) as file:
                        for name in chosen:
                            yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelUnsupported(f"{self._checkpoint} cannot be read: {error}") from error

    def fingerprint(self) -> str:
        """SHA-256, in hex, over every tensor's name, dtype, shape and first elements.

        It distinguishes base models; it does not prove that a checkpoint is undamaged.

        Raises:
            ModelUnsupported: a file cannot be read.
        """
        digest = hashlib.sha256()
        for name, tensor in self.read(self.names, torch.device("cpu")):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            start = tensor.flatten()[:_FINGERPRINT_ELEMENTS].contiguous()
            digest.update(start.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
