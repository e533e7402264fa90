"""Adapter versions on disk: content-addressed directories, written atomically, with optimiser and random state."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from clawloop.core.adapters.directory import (
    BASE_FILE,
    CONFIG_FILE,
    HASHED_FILES,
    WEIGHTS_FILE,
    check_version,
    files_sha256,
    read_adapter_file,
)
from clawloop.core.durable_files import sync_folder
from clawloop.core.errors import AdapterUnusable, ClawloopError, DiskFull, TrainerUnavailable
from clawloop.training.model.port import (
    PROJECTIONS,
    LoraShape,
    PolicyModel,
    adapter_tensors,
    full_tensor,
    reset_adapter,
    set_adapter,
    shard_like,
)

# Room -----------------------------------------------------------------------------------------------------------------
# Check that the disk has room for another version.

_MIB = 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDY = "make room, or lower CLAWLOOP_MIN_FREE_DISK_GIB, then `clawloop training resume`"


def require_room(adapters: Path, version_bytes: int, kept_free: int) -> None:
    """
    Args:
        adapters: the folder of all versions.
        version_bytes: size of the version that will be written.
        kept_free: bytes that must be free afterwards.

    Raises:
        DiskFull: less space is free.
        TrainerUnavailable: the folder cannot be read.
    """
    try:
        adapters.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(adapters).free
    except OSError as error:
        raise TrainerUnavailable(f"{adapters} cannot be used: {error.strerror}") from error
    if free < version_bytes + kept_free:
        raise DiskFull(
            f"{free // _MIB} MiB are free in {adapters}, a version takes {version_bytes // _MIB} MiB and "
            f"{kept_free // _MIB} MiB are kept free for chats: {_REMEDY}"
        )


def write_error(version: int, error: OSError) -> ClawloopError:
    """The error to raise where a version could not be written."""
    what = f"version {version} cannot be written: {error.strerror}"
    return DiskFull(f"{what}: {_REMEDY}") if error.errno in _FULL else TrainerUnavailable(what)


# Files ----------------------------------------------------------------------------------------------------------------
# Adapter versions on disk: directories in PEFT's format, content-addressed and written atomically.
#
# A version is a directory `v{n}-{sha256[:12]}`. It appears by a rename after all its files are synced, and never
# changes afterwards: engines may read it at any time, and two directories of the same name hold the same adapter.

_UNFINISHED = ".writing-"


class BaseIdentity(BaseModel):
    """Identity of an adapter's base model.

    `name` is for people and PEFT; `fingerprint` (`BaseWeights.fingerprint`) is compared.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    fingerprint: str


class _PeftConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    peft_type: str
    r: int
    lora_alpha: float
    target_modules: tuple[str, ...]
    bias: str = "none"
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    modules_to_save: tuple[str, ...] | None = None
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    layers_to_transform: tuple[int, ...] | int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """LoRA weights in memory.

    Args:
        lora: its shape.
        tensors: unsharded float32 tensors on the CPU, by their names in PEFT's file.
        base: the base model it was trained on; None if its files do not name one.
    """

    lora: LoraShape
    tensors: Mapping[str, Tensor]
    base: BaseIdentity | None


@dataclass(frozen=True, slots=True)
class WrittenVersion:
    """A version's directory and the hash of its adapter, in hex."""

    path: Path
    sha256: str


def adapter_files(adapter: Adapter) -> dict[str, bytes]:
    """File name → content of the adapter's three files. Deterministic."""
    if adapter.base is None:
        raise AdapterUnusable("cannot write an adapter without the identity of its base model")
    weights = {name: tensor.contiguous() for name, tensor in adapter.tensors.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base.name,
        "r": adapter.lora.rank,
        "lora_alpha": adapter.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(adapter.lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    return {
        # One metadata key only: safetensors does not write several in a fixed order.
        WEIGHTS_FILE: save(weights, metadata={"format": "pt"}),
        CONFIG_FILE: _json(config),
        BASE_FILE: _json(adapter.base.model_dump()),
    }


def _make_readable(folder: Path) -> None:
    """Create a folder and its parents, such that an engine of another user may read what is in it."""
    if not folder.exists():
        _make_readable(folder.parent)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)  # `mkdir` alone would apply the umask


def write_version(parent: Path, version: int, files: Mapping[str, bytes]) -> WrittenVersion:
    """Writes a version's directory, all files or none.

    Args:
        parent: the policy's directory; created if missing.
        version: its number.
        files: those of `adapter_files`, which are hashed, and any others to store beside them.

    Raises:
        AdapterUnusable: the directory exists, but its content does not match its name.
        AdapterUnreadable
    """
    digest = files_sha256({name: files[name] for name in HASHED_FILES})
    target = parent / f"v{version}-{digest[:12]}"
    _make_readable(parent)
    if target.exists():
        check_version(target, digest)
        return WrittenVersion(target, digest)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}v{version}-", dir=parent))
    try:
        for name, content in files.items():
            _write_file(unfinished / name, content)
        unfinished.chmod(0o755)  # mkdtemp makes it 0700; engines may run as another user
        sync_folder(unfinished)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(parent)
    return WrittenVersion(target, digest)


def remove_unfinished(parent: Path, age: timedelta = timedelta()) -> int:
    """Deletes directories of killed writers that are older than `age`; another trainer may be writing a newer one."""
    before = time.time() - age.total_seconds()
    leftovers = [path for path in parent.glob(f"{_UNFINISHED}*") if path.stat().st_mtime <= before]
    for path in leftovers:
        shutil.rmtree(path)
    return len(leftovers)


def read_adapter(path: Path, *, base: BaseIdentity | None = None) -> Adapter:
    """Reads an adapter in PEFT's format, written by Clawloop or by another program.

    Whether it has the tensors of its base model is checked where it is used (`set_adapter`).

    Args:
        path: its directory.
        base: if given, the adapter must have been trained on this base model.

    Raises:
        AdapterUnusable: damaged, not plain LoRA, or trained on another base model.
        AdapterUnreadable
    """
    try:
        config = _PeftConfig.model_validate_json(read_adapter_file(path / CONFIG_FILE))
        stored = load(read_adapter_file(path / WEIGHTS_FILE))
        written_for = _base_of(path)
    except (ValidationError, SafetensorError) as error:
        raise AdapterUnusable(f"{path} is damaged: {error}") from error
    if base is not None and (written_for is None or written_for.fingerprint != base.fingerprint):
        other = "an unknown base model" if written_for is None else f"another {written_for.name}"
        raise AdapterUnusable(f"{path} was trained on {other}, not on this {base.name}")
    lora = _plain_lora(path, config)
    if foreign := sorted(name for name in stored if name.rsplit(".", 3)[-3] not in lora.targets):
        raise AdapterUnusable(f"{path}: {len(foreign)} tensors are of no target, the first is {foreign[0]}")
    return Adapter(lora, {name: stored[name].float() for name in sorted(stored)}, written_for)


def _base_of(path: Path) -> BaseIdentity | None:
    """The base model that the adapter was trained on; None if its directory does not say."""
    try:
        content = read_adapter_file(path / BASE_FILE)
    except AdapterUnusable:
        return None
    return BaseIdentity.model_validate_json(content)


def adapter_lora(path: Path) -> LoraShape:
    """The LoRA shape of the adapter in this directory, from its config only.

    Raises:
        AdapterUnusable: the config is damaged, or not plain LoRA.
        AdapterUnreadable
    """
    try:
        return _plain_lora(path, _PeftConfig.model_validate_json(read_adapter_file(path / CONFIG_FILE)))
    except ValidationError as error:
        raise AdapterUnusable(f"{path} is damaged: {error}") from error


def _plain_lora(path: Path, config: _PeftConfig) -> LoraShape:
    unsupported = {
        "bias": config.bias != "none",
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "fan_in_fan_out": config.fan_in_fan_out,
        "modules_to_save": bool(config.modules_to_save),
        "rank_pattern": bool(config.rank_pattern),
        "alpha_pattern": bool(config.alpha_pattern),
        "layers_to_transform": config.layers_to_transform is not None,
        config.peft_type: config.peft_type != "LORA",
    }
    if used := [what for what, is_used in unsupported.items() if is_used]:
        raise AdapterUnusable(f"{path} is not plain LoRA: {', '.join(used)}")
    if unknown := set(config.target_modules) - set(PROJECTIONS):
        raise AdapterUnusable(f"{path} has LoRA on {sorted(unknown)}; the trainer supports {PROJECTIONS}")
    return LoraShape(config.r, config.lora_alpha, tuple(p for p in PROJECTIONS if p in config.target_modules))


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# Checkpoints ----------------------------------------------------------------------------------------------------------
# A version's directory: adapter, optimiser state and random state.
#
# Everything that a later step depends on is saved, so the same batch on the same version gives the same adapter, bit
# for bit, in one CPU process. Under FSDP every rank calls these functions; the files hold unsharded tensors and do not
# depend on the number of ranks. The database, not the directory, knows whether a version was committed.

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
