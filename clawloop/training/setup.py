"""Settings of a trainer: base model, folder of versions, device and limits. Passed to the ranks as JSON."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from clawloop.core.errors import ModelUnsupported, SetupError, TrainerUnavailable
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.checkpoint import read_family
from clawloop.training.options import Backend, Dtype, Quantisation, RankWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TrainerSetup(BaseModel):
    """Settings of one trainer.

    Args:
        model: Hugging Face folder of the base model.
        base_model: the name by which engines serve it; None accepts the folder's name, also as the last part of a path.
        adapters: the data folder's `adapters`, with a folder for each policy.
        device: None: a GPU if there is one.
        dtype: of base weights and arithmetic; None: bfloat16 on a GPU, the checkpoint's own on a CPU.
        max_tokens: longest sample; None: all positions of the model.
        micro_batch_tokens: input tokens of one forward, see `Limits.budget_tokens`.
        recompute_beyond: input tokens of the largest micro-batch of which no layer is computed again in the backward
            pass. Doing it saves memory, and took 26 to 40 % of a pass with gradient (SmolLM2, 627 tokens, on a CPU).
        quantise: the base model's projections to 4 bits once it is loaded; the recipe has to be decoupled then.
        engines_quantised: engines serve a quantised copy of the model; the recipe has to be decoupled then too.
        backend: which library computes the model; None: by its family, see `read_family`.
        threads: of torch on the CPU; None: one for each of `cores()`, of which a step takes what others leave idle.
        kept_free_bytes: a step is not begun if less would be free on the disk of `adapters` after it.
        ranks: of several, `replicated` ranks hold the base model whole each, `sharded` ones a share of it (FSDP).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Path
    adapters: Path
    base_model: str | None = None
    device: Literal["cpu", "cuda"] | None = None
    dtype: Dtype | None = None
    max_tokens: PositiveInt | None = None
    micro_batch_tokens: PositiveInt = 8192
    recompute_beyond: NonNegativeInt = 0
    backend: Backend | None = None
    quantise: Quantisation | None = None
    engines_quantised: bool = False
    threads: PositiveInt | None = None
    ranks: RankWeights = "sharded"
    kept_free_bytes: NonNegativeInt = 0

    def check(self, nproc: int = 1) -> None:
        """Raise SetupError if this machine cannot train with these settings, by so many ranks."""
        try:
            read_family(self.model, self.backend, self.max_tokens)
            BaseWeights(self.model)
        except ModelUnsupported as error:
            raise SetupError(f"--model: {error}") from error
        device = self.torch_device()
        if nproc > 1 and self.quantise is not None and self.ranks == "sharded":
            raise SetupError("--quantise needs the base model whole on each rank: --ranks replicated, or --nproc 1")
        if device.type == "cuda" and nproc > (found := torch.cuda.device_count()):
            raise SetupError(f"--nproc {nproc}: each rank needs a GPU of its own, and torch finds {found} here")

    def require_base(self, base_model: str) -> None:
        """Raise TrainerUnavailable if the policy's base is not this trainer's model."""
        own = self.base_model or self.model.resolve().name
        if base_model != own and (self.base_model is not None or base_model.rsplit("/", 1)[-1] != own):
            raise TrainerUnavailable(
                f"this trainer has {own!r}, the policy's base is {base_model!r}: start one with "
                f"`--model DIR --base-model {base_model}`"
            )

    def files_stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Names, sizes and times of the model's files; changes when they do."""
        try:
            files = [(path.name, path.stat()) for path in sorted(self.model.iterdir()) if _is_model_file(path)]
        except OSError as error:
            raise TrainerUnavailable(f"{self.model} cannot be read: {error.strerror}") from error
        return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)

    def torch_device(self) -> torch.device:
        """
        Raises:
            SetupError: there is no GPU, and one is asked for, or was there at an earlier start. A restarted rank checks
                too: it would otherwise silently go on with the CPU.
        """
        if self.device == "cpu" or not torch.cuda.is_available():
            if self.device == "cuda":
                raise SetupError("--device cuda: torch finds no CUDA device on this machine")
            if self.device is None and self._gpu_note.exists():
                raise SetupError(
                    f"torch finds no CUDA device, and trainers on this machine had one before ({self._gpu_note}):"
                    " repair the driver and start again, or give --device cpu to go on without, much slower;"
                    " if the GPU is gone for good, delete that file"
                )
            return torch.device("cpu")
        # torchrun sets LOCAL_RANK to the index of this rank's GPU.
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def _gpu_note(self) -> Path:
        """Exists once a trainer without `--device` has found a GPU here; other machines may share the folder."""
        return self.adapters / f".gpu-on-{socket.gethostname()}"

    def note_device(self, device: torch.device) -> None:
        """Leaves a note for later starts that this machine has a GPU."""
        if self.device is None and device.type == "cuda":
            with suppress(OSError):  # without the note, a later start without a GPU takes the CPU, and its log says so
                self._gpu_note.parent.mkdir(parents=True, exist_ok=True)
                self._gpu_note.touch()

    def torch_dtype(self, device: torch.device) -> torch.dtype:
        if self.dtype is not None:
            return DTYPES[self.dtype]
        if device.type == "cuda":
            return torch.bfloat16
        config = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        return DTYPES.get(config.get("dtype") or config.get("torch_dtype"), torch.float32)

    def bound_threads(self) -> None:
        """Sets torch's number of threads; the order of sums, and so an adapter's hash, depends on it."""
        torch.set_num_threads(self.threads or cores())


def cores(root: Path = Path("/")) -> int:
    """Cores this process may use: by its affinity, and by its container's quota where control groups are of version 2.

    More threads than that wait for each other in every product.

    Args:
        root: above `sys`.
    """
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError):
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            found = min(found, -(-int(quota) // int(period)))
    return found


def _is_model_file(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json")
