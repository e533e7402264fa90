"""Quantised tensors of a model folder, as the weights that they stand for: their shapes, and the bytes they take.

AWQ and GPTQ store a projection as `qweight`, eight 4-bit weights in a word, with `scales` for groups of inputs;
compressed-tensors as `weight_packed` with `weight_scale`; FP8 as `weight`, a byte each, with a scale or some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clawloop.errors import SetupError

METHODS = ("awq", "gptq", "fp8", "compressed-tensors")
"""`quantization_config.quant_method` of the folders whose memory is known."""
# Scales, zeros and orders of inputs: they take memory, and are no weights of the model.
_BESIDE = (
    "scales",
    "qzeros",
    "g_idx",
    "weight_scale",
    "weight_scale_inv",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "input_scale",
    "k_scale",
    "v_scale",
)
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
_WORD_BITS = 32
_AGAIN = "download the model again, completely"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as its file's header says.

    Args:
        dtype: as safetensors names it, e.g. `BF16`.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of the tensors that the engine loads: all but the speculative heads."""
    return sum(t.numbers * _BYTES.get(t.dtype, 1) for name, t in tensors.items() if not name.startswith("mtp."))


def unquantised(folder: Path, tensors: Mapping[str, Tensor], quantisation: Mapping[str, object]) -> dict[str, Tensor]:
    """Each weight by its usual name, with the shape [outputs, inputs] that it has unquantised.

    Raises:
        SetupError: the bits of a packed weight are not known, or scales are missing.
    """
    if not any(name.endswith(_BESIDE) for name in tensors):
        raise SetupError(f"{folder} is quantised, says its config.json, but has no scales: {_AGAIN}")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            found[f"{module}.weight"] = _packed(folder, tensors, module, tensor, quantisation)
        elif kind == "weight_packed":
            outputs, words = tensor.shape
            bits = _bits(folder, quantisation, module)
            found[f"{module}.weight"] = Tensor((outputs, words * _WORD_BITS // bits), "BF16")
        elif kind not in _BESIDE:
            # A byte is a weight of FP8.
            found[name] = tensor if tensor.dtype in _BYTES else Tensor(tensor.shape, "BF16")
    return found


def _packed(
    folder: Path, tensors: Mapping[str, Tensor], module: str, packed: Tensor, quantisation: Mapping[str, object]
) -> Tensor:
    scales = tensors.get(f"{module}.scales")
    if scales is None:
        raise SetupError(f"{folder} lacks the scales of {module}: {_AGAIN}")
    # AWQ packs outputs, GPTQ inputs: scales have all outputs in both.
    outputs = scales.shape[-1]
    bits = _bits(folder, quantisation, module)
    return Tensor((outputs, packed.numbers * _WORD_BITS // bits // outputs), "BF16")


def _bits(folder: Path, quantisation: Mapping[str, object], module: str) -> int:
    """AWQ and GPTQ have one number for all; compressed-tensors has groups, of which all are taken to have the same."""
    found = [quantisation.get("bits")]
    groups = quantisation.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        found.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    bits = {number for number in found if isinstance(number, int) and number > 0}
    if len(bits) != 1:
        raise SetupError(f"{folder} does not give the bits of {module}: its memory cannot be computed")
    return bits.pop()
