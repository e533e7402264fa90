"""A model's copy in four bits, rounded to the nearest, as AWQ and GPTQ store it; and in bfloat16 again, unpacked.

Nothing is calibrated: what is compared with a copy is how vLLM computes it, not how well a method chooses its values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Method = Literal["awq", "gptq"]
GROUP = 128
_WORD = 8  # values of four bits in an int32
# AWQ's place of each of eight columns in a word (AutoAWQ's `packing_utils`).
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_CONFIGS: dict[Method, dict[str, object]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    },
}


def write_copy(model: Path, folder: Path, method: Method) -> Path:
    """A copy that engines serve, in a new folder."""
    return _write(model, folder, method, packed=True)


def write_unpacked(model: Path, folder: Path, method: Method) -> Path:
    """The same weights as a model that is not quantised, in a new folder."""
    return _write(model, folder, method, packed=False)


def _write(model: Path, folder: Path, method: Method, *, packed: bool) -> Path:
    shutil.copytree(model, folder)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = weight if not packed else weight.to(torch.float16)
            continue
        module = name.removesuffix(".weight")
        values, zeros, scales = _rounded(weight.float(), method)
        if packed:
            stored = _packed(values, zeros, scales, method)
            tensors |= {f"{module}.{kind}": tensor.contiguous() for kind, tensor in stored.items()}
        else:
            groups = (values.view(-1, GROUP, values.shape[1]) - zeros[:, None]) * scales.float()[:, None]
            tensors[name] = groups.reshape_as(values).T.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    changed = {"quantization_config": _CONFIGS[method], "dtype": "float16"} if packed else {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def _rounded(weight: Tensor, method: Method) -> tuple[Tensor, Tensor, Tensor]:
    """Values [in, out] from 0 to 15, zero points and float16 scales [groups, out]."""
    groups = weight.T.contiguous().view(-1, GROUP, weight.shape[0])
    if method == "gptq":
        scales = (groups.abs().amax(1) / 7).half()
        zeros = torch.full_like(scales, 8, dtype=torch.float32)
    else:
        low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
    values = ((groups / scales.float()[:, None]).round() + zeros[:, None]).clamp(0, 15)
    return values.view(-1, weight.shape[0]), zeros, scales


def _packed(values: Tensor, zeros: Tensor, scales: Tensor, method: Method) -> dict[str, Tensor]:
    if method == "awq":
        return {"qweight": _words(values, _AWQ_ORDER), "qzeros": _words(zeros, _AWQ_ORDER), "scales": scales}
    inputs = values.shape[0]
    order = tuple(range(_WORD))
    return {
        "qweight": _words(values.T, order).T,
        "qzeros": _words(zeros - 1, order),  # the format counts them from 1
        "scales": scales,
        "g_idx": torch.arange(inputs, dtype=torch.int32) // GROUP,
    }


def _words(values: Tensor, order: tuple[int, ...]) -> Tensor:
    """int32[rows, columns / 8] of values in float[rows, columns]."""
    columns = values.to(torch.int64).reshape(values.shape[0], -1, _WORD)
    words = torch.zeros(columns.shape[:2], dtype=torch.int64)
    for place, column in enumerate(order):
        words |= columns[:, :, column] << (4 * place)
    # The topmost value of a word is its sign.
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
