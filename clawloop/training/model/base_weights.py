"""The tensors of a Hugging Face checkpoint, in one safetensors file or several.

Knows nothing about models: it finds a tensor by name and says which checkpoint it came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clawloop.errors import ModelUnsupported

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Enough of each tensor to tell two fine-tunes apart without reading a whole checkpoint at every start.
_FINGERPRINT_ELEMENTS = 1024


class BaseWeights:
    """A checkpoint's tensors, read one at a time.

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
        """File name → the tensors it holds, both in a fixed order."""
        files: dict[str, list[str]] = {}
        for name, file in sorted(self._file_of.items()):
            files.setdefault(file, []).append(name)
        return dict(sorted(files.items()))

    def read(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """These tensors on this device, one after the other, in the dtype in which they are stored.

        Raises:
            ModelUnsupported: one of them is not there.
        """
        wanted = set(names)
        if missing := sorted(wanted - self.names):
            raise ModelUnsupported(f"{self._checkpoint} lacks {len(missing)} tensors, the first is {missing[0]}")
        try:
            for file_name, held in self.files().items():
                if chosen := [name for name in held if name in wanted]:
                    path = self._checkpoint / file_name
                    with safe_open(path, framework="pt", device=str(device)) as file:
                        for name in chosen:
                            yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelUnsupported(f"{self._checkpoint} cannot be read: {error}") from error

    def fingerprint(self) -> str:
        """SHA-256, in hex, over every tensor's name, dtype, shape and first elements.

        It tells base models apart; it does not prove that a checkpoint is undamaged.
        """
        digest = hashlib.sha256()
        for file_name, held in self.files().items():
            with safe_open(self._checkpoint / file_name, framework="pt") as file:
                for name in held:
                    tensor = file.get_tensor(name)
                    digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
                    start = tensor.flatten()[:_FINGERPRINT_ELEMENTS].contiguous()
                    digest.update(start.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()
