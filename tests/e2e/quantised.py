"""Models with four-bit weights, as AWQ and GPTQ store them, and the same weights in float32 to compare with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Method = Literal["awq", "gptq"]
Integers = NDArray[np.int64]

GROUP = 32  # weights that share a scale and a zero
BITS = 4
PER_WORD = 32 // BITS
# AWQ's order of eight columns in one word, for its kernels on GPUs.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS = {
    "awq": {"quant_method": "awq", "bits": BITS, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {
        "quant_method": "gptq",
        "bits": BITS,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
    },
}


def quantise(model: Path, quantised: Path, plain: Path, method: Method, template: str) -> None:
    """Write two folders: with four-bit projections, and with what those stand for in float32.

    Args:
        template: the chat template of both.
    """
    stored: dict[str, NDArray[np.generic]] = {}
    meant: dict[str, NDArray[np.generic]] = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = weight
            continue
        values_IO, zeros_GO, scales_GO = _four_bits(weight.T, symmetric=method == "gptq")
        meant[name] = _meant(values_IO, zeros_GO, scales_GO).T.copy()
        layer = name.removesuffix(".weight")
        stored[f"{layer}.scales"] = scales_GO.astype(np.float16)
        if method == "awq":
            stored[f"{layer}.qweight"] = _pack_columns(values_IO, AWQ_ORDER)
            stored[f"{layer}.qzeros"] = _pack_columns(zeros_GO, AWQ_ORDER)
        else:
            stored[f"{layer}.qweight"] = _pack_columns(values_IO.T, range(PER_WORD)).T.copy()
            stored[f"{layer}.qzeros"] = _pack_columns(zeros_GO - 1, range(PER_WORD))  # its format subtracts one
            stored[f"{layer}.g_idx"] = (np.arange(len(values_IO)) // GROUP).astype(np.int32)
    for folder, tensors in ((quantised, stored), (plain, meant)):
        shutil.copytree(model, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "chat_template.jinja").write_text(template)
    config = json.loads((model / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[method]}))


def _four_bits(weight_IO: NDArray[np.float32], *, symmetric: bool) -> tuple[Integers, Integers, NDArray[np.float16]]:
    """Values from 0 to 15, and for each group of inputs a zero and a scale."""
    groups_GIO = weight_IO.reshape(-1, GROUP, weight_IO.shape[1])
    if symmetric:
        scales_GO = np.abs(groups_GIO).max(axis=1) / 7
        zeros_GO = np.full(scales_GO.shape, 8, dtype=np.int64)
    else:
        low, high = groups_GIO.min(axis=1), groups_GIO.max(axis=1)
        scales_GO = (high - low) / 15
        zeros_GO = np.clip(np.round(-low / scales_GO), 0, 15).astype(np.int64)
    scales_GO = scales_GO.astype(np.float16)
    values = np.round(groups_GIO / scales_GO[:, None].astype(np.float32)) + zeros_GO[:, None]
    return np.clip(values, 0, 15).astype(np.int64).reshape(weight_IO.shape), zeros_GO, scales_GO


def _meant(values_IO: Integers, zeros_GO: Integers, scales_GO: NDArray[np.float16]) -> NDArray[np.float32]:
    zeros_IO, scales_IO = np.repeat(zeros_GO, GROUP, axis=0), np.repeat(scales_GO, GROUP, axis=0)
    meant: NDArray[np.float32] = (values_IO - zeros_IO).astype(np.float32) * scales_IO.astype(np.float32)
    return meant


def _pack_columns(values: Integers, order: range | tuple[int, ...]) -> NDArray[np.int32]:
    """Eight columns in one word, the first of `order` in its lowest bits."""
    words = np.zeros((values.shape[0], values.shape[1] // PER_WORD), dtype=np.int64)
    for place, column in enumerate(order):
        words |= values[:, column::PER_WORD] << (BITS * place)
    return words.astype(np.uint32).view(np.int32)
