"""Merges an adapter into its base model: writes a Hugging Face checkpoint in bfloat16 and checks its logits.

The merged weight is W + (alpha / rank)·B·A, computed in float32 and rounded once.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from clawloop.core.errors import AdapterUnusable, SetupError
from clawloop.training.adapters.files import Adapter, read_adapter
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.checkpoint import Family, read_family
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import set_adapter
from clawloop.training.packing import TokenSequence, collate

_COPIED = (".json", ".txt", ".model", ".jinja")
_NOT_COPIED = ("model.safetensors.index.json", "config.json")
# bfloat16 keeps 8 bits, so each weight is off by up to 0.4 %; on random models with large weights 1.5 % of the logits'
# norm was measured. A wrong merge stays below 5 % only if the adapter hardly changes anything.
_TOLERANCE = 0.05
_PROBE_TOKENS = 64
_PEFT_PREFIX = "base_model.model."
_HALF_A = ".lora_A.weight"


@dataclass(frozen=True, slots=True)
class MergeReport:
    """Relative differences of logits on random tokens.

    Args:
        logit_error: norm of (merged − base with adapter) over the norm of base with adapter.
        logit_change: norm of (base with adapter − base) over the norm of base with adapter.
    """

    logit_error: float
    logit_change: float


def merge(base: Path, adapter: Path, out: Path, *, device: torch.device | None = None) -> MergeReport:
    """Writes base + adapter as a new checkpoint, and compares its logits with those of base with adapter.

    Args:
        base: Hugging Face directory the adapter was trained on.
        adapter: directory in PEFT's format.
        out: must not exist.
        device: runs the check; CPU if None.

    Raises:
        SetupError: `out` exists.
        AdapterUnusable: the adapter does not fit the base, or the merged logits are wrong; `out` is removed.
        AdapterUnreadable
        ModelUnsupported: see `read_family`.
    """
    if out.exists():
        raise SetupError(f"{out} exists; give a directory that does not exist")
    family = read_family(base)
    read = read_adapter(adapter)
    weights = BaseWeights(base)
    if read.base is not None and read.base.fingerprint != weights.fingerprint():
        raise AdapterUnusable(f"{adapter} was trained on another {read.base.name} than {base}")
    deltas = adapted_weights(read, family, weights)
    out.mkdir(parents=True)
    try:
        _write_weights(weights, read, deltas, out)
        _copy_rest(base, out)
        report = _compare(base, read, out, device or torch.device("cpu"))
        if report.logit_error > _TOLERANCE:
            raise AdapterUnusable(
                f"merged logits differ by {report.logit_error:.1%}, bfloat16 explains {_TOLERANCE:.0%}"
            )
    except BaseException:
        shutil.rmtree(out)
        raise
    return report


def adapted_weights(adapter: Adapter, family: Family, weights: BaseWeights) -> dict[str, str]:
    """Name of a checkpoint's weight → what the names of its two tensors in the adapter begin with.

    Raises:
        AdapterUnusable: the adapter changes what the base model does not have.
    """
    deltas = {}
    for name in adapter.tensors:
        if (half := name.removesuffix(_HALF_A)) == name:
            continue
        names = family.checkpoint_names(half.removeprefix(_PEFT_PREFIX))
        found = [one for one in names if one in weights.names]
        if not found:
            raise AdapterUnusable(f"the adapter changes {names[0]}, which the base model does not have")
        deltas[found[0]] = half
    return deltas


def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale·B·A in float32, rounded to bfloat16."""
    return (weight.float() + scale * (b.float() @ a.float())).bfloat16()


def _write_weights(weights: BaseWeights, adapter: Adapter, deltas: dict[str, str], out: Path) -> None:
    scale = adapter.lora.alpha / adapter.lora.rank
    total = 0
    weight_map: dict[str, str] = {}
    for file_name, names in weights.files().items():
        shard = dict(weights.read(names, torch.device("cpu")))
        for name in names:
            if (adapted := deltas.get(name)) is None:
                shard[name] = shard[name].bfloat16()
            else:
                a, b = (adapter.tensors[f"{adapted}.lora_{half}.weight"] for half in "AB")
                shard[name] = merged_weight(shard[name], a, b, scale)
            total += shard[name].nbytes
            weight_map[name] = file_name
        save_file(shard, out / file_name, metadata={"format": "pt"})
        (out / file_name).chmod(0o644)  # safetensors writes 0600
    if len(weights.files()) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def _copy_rest(base: Path, out: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    for key in ("dtype", "torch_dtype"):  # transformers 5 and 4
        if key in config:
            config[key] = "bfloat16"
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    for path in sorted(base.iterdir()):
        if path.suffix in _COPIED and path.name not in _NOT_COPIED:
            shutil.copyfile(path, out / path.name)


@torch.no_grad()
def _compare(base: Path, adapter: Adapter, out: Path, device: torch.device) -> MergeReport:
    model = load_model(base, adapter.lora, dtype=torch.float32, device=device, max_tokens=_PROBE_TOKENS)
    set_adapter(model, adapter.tensors)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (_PROBE_TOKENS,), generator=generator).tolist()
    packed = collate([TokenSequence("probe", ids, [0], 1.0)], [0]).to(device)
    expected = model.logits(model.hidden_states(packed))
    with model.without_adapter():
        base_only = model.logits(model.hidden_states(packed))
    del model  # a second model of this size may not fit beside it
    merged = load_model(out, adapter.lora, dtype=torch.float32, device=device, max_tokens=_PROBE_TOKENS)
    actual = merged.logits(merged.hidden_states(packed))
    norm = expected.norm()
    return MergeReport(float((actual - expected).norm() / norm), float((base_only - expected).norm() / norm))
