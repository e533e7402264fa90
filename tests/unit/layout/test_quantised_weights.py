"""Folders with quantised weights: the shape of the model they stand for, and the bytes they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from clawloop.app.layout.model_folder import read_model_shape
from clawloop.core.errors import SetupError
from tests.unit.layout.folders import QWEN3, qwen3_tensors, write_folder

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 8}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}

Stored = dict[str, NDArray[np.generic]]


def stored_as(method: str, outputs: int, inputs: int) -> Stored:
    """A projection as this method stores it, with groups of eight inputs."""
    groups, word = inputs // 8, np.int32
    scales = np.zeros((groups, outputs), np.float16)
    match method:
        case "awq":
            zeros = np.zeros((groups, outputs // 8), word)
            return {"qweight": np.zeros((inputs, outputs // 8), word), "scales": scales, "qzeros": zeros}
        case "gptq":
            zeros, order = np.zeros((groups, outputs // 8), word), np.zeros(inputs, word)
            packed = np.zeros((inputs // 8, outputs), word)
            return {"qweight": packed, "scales": scales, "qzeros": zeros, "g_idx": order}
        case "fp8":  # numpy has no eight-bit floats; the header's dtype is a byte's all the same
            return {"weight": np.zeros((outputs, inputs), np.uint8), "weight_scale": np.zeros(1, np.float32)}
        case _:
            packed = np.zeros((outputs, inputs // 8), word)
            return {"weight_packed": packed, "weight_scale": scales.T.copy(), "weight_shape": np.zeros(2, np.int64)}


def write_quantised(folder: Path, config: dict[str, object]) -> tuple[Path, int]:
    """A folder, and the bytes of its tensors."""
    write_folder(folder, {**QWEN3, "quantization_config": config})
    tensors: Stored = {}
    for name, shape in qwen3_tensors().items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            stored = stored_as(str(config["quant_method"]), *shape)
            tensors |= {f"{module}.{kind}": tensor for kind, tensor in stored.items()}
        else:
            tensors[name] = np.zeros(shape, np.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder, sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("config", [AWQ, GPTQ, FP8, COMPRESSED], ids=lambda config: str(config["quant_method"]))
def test_a_quantised_model_has_the_shape_of_the_whole_one_and_its_own_bytes(
    config: dict[str, object], tmp_path: Path
) -> None:
    folder, size = write_quantised(tmp_path / "quantised", config)
    whole, shape = read_model_shape(write_folder(tmp_path / "whole")), read_model_shape(folder)
    for name in ("parameters", "lora", "kv", "query"):
        assert getattr(shape, name) == getattr(whole, name)
    assert shape.stored_bytes == size
    assert shape.quantised == config["quant_method"]
    assert whole.stored_bytes is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "awq"}, "does not give the bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "does not give the bits"),
        (
            {"quant_method": "bitsandbytes"},
            "quantised by 'bitsandbytes', whose memory is not computed",
        ),
    ],
)
def test_what_cannot_be_computed_is_one_clear_line(config: dict[str, object], said: str, tmp_path: Path) -> None:
    folder, _ = write_quantised(tmp_path / "quantised", {**config})
    with pytest.raises(SetupError, match=said):
        read_model_shape(folder)


def test_a_packed_projection_without_scales_is_one_clear_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "cut", {**QWEN3, "quantization_config": AWQ})
    with pytest.raises(SetupError, match=r"config\.json, but has no scales"):
        read_model_shape(folder)
    tensors: Stored = {
        "model.layers.0.self_attn.q_proj.qweight": np.zeros((8, 2), np.int32),
        "model.layers.0.self_attn.k_proj.scales": np.zeros((2, 2), np.float16),
    }
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SetupError, match=r"lacks the scales of model\.layers\.0\.self_attn\.q_proj"):
        read_model_shape(folder)
