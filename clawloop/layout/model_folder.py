"""A model folder → its shape: `config.json` and the headers of its safetensors files, never a weight.

Projections are found by their names (`q_proj`, …) and sizes by their tensors, so that every family that keeps its
projections apart is understood, whatever its config calls things.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from clawloop.errors import SetupError
from clawloop.families.chat_format import ChatFormat, ChatOptions, read_chat_format
from clawloop.layout.model_shape import KvShape, LoraShape, ModelShape
from clawloop.layout.quantised_weights import METHODS, Tensor, stored_bytes, unquantised

COLUMN_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PROJECTIONS = ("o_proj", "down_proj")
_NO_MODEL = "give the folder of a model in Hugging Face's layout: --model DIR"
_AGAIN = "download the model again, completely"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"(?:^|\.)experts\.")
# Towers and projectors of models that also see and hear, and heads that only speculative decoding reads.
_BESIDE_TEXT = ("visual", "vision", "audio", "multi_modal", "mm_", "embed_vision", "embed_audio", "mtp")
_FLOAT32_TYPES = ("F32", "F64")


def read_model_shape(folder: Path, chat: ChatOptions | None = None) -> ModelShape:
    """The shape of the model in this folder.

    Args:
        chat: what an operator sets instead of what is found.

    Raises:
        SetupError: the folder is no complete model, or no layout is known for it; one line says which.
    """
    config = _config(folder)
    stored = _tensors(folder)
    method = _quantisation(folder, config)
    tensors = stored if method is None else unquantised(folder, stored, _table(config, "quantization_config"))
    chat_format = read_chat_format(folder, chat)
    _require_tokenizer(folder)
    text = {**config, **_table(config, "text_config")}
    shape = _shape(folder, config, text, tensors, chat_format)
    return shape if method is None else replace(shape, stored_bytes=stored_bytes(stored), quantised=method)


def _config(folder: Path) -> dict[str, object]:
    if not folder.is_dir():
        raise SetupError(f"there is no model folder {folder}: {_NO_MODEL}")
    path = folder / "config.json"
    if not path.is_file():
        raise SetupError(f"{folder} holds no model, config.json is missing: {_NO_MODEL}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}: {_AGAIN}") from error
    names = content.get("architectures") if isinstance(content, dict) else None
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise SetupError(f"{path} does not describe a language model: {_NO_MODEL}")
    return dict(content)


def _quantisation(folder: Path, config: Mapping[str, object]) -> str | None:
    found = config.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else None
    if method not in METHODS:
        raise SetupError(
            f"{folder} has weights quantised by {method!r}, whose memory is not computed: give one of "
            f"{', '.join(METHODS)}, or the unquantised model"
        )
    return str(method)


def _tensors(folder: Path) -> dict[str, Tensor]:
    # Imported here, so that `up` without its extra names the extra that it needs, which holds more than this package.
    from safetensors import SafetensorError

    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [folder / name for name in sorted(named)]
        if not files:
            raise SetupError(f"{folder} has no weights (*.safetensors): {_AGAIN}")
        if missing := [file.name for file in files if not file.is_file()]:
            raise SetupError(f"{folder} lacks {len(missing)} files of weights, the first is {missing[0]}: {_AGAIN}")
        return {name: tensor for file in files for name, tensor in _header(file)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise SetupError(f"the weights in {folder} cannot be read: {error}: {_AGAIN}") from error


def _header(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    # numpy's names no bfloat16; the header alone is read, so it does not matter.
    with safe_open(file, framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118  # not a mapping
            piece = opened.get_slice(name)
            yield name, Tensor(tuple(piece.get_shape()), piece.get_dtype())


def _require_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        raise SetupError(f"{folder} has no tokenizer (tokenizer.json): {_AGAIN}")
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be read: {error}: {_AGAIN}") from error


def _shape(
    folder: Path,
    config: Mapping[str, object],
    text: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    chat: ChatFormat,
) -> ModelShape:
    architecture = str(_list(config, "architectures")[0])
    decoder = _decoder_tensors(tensors)
    projections = {name: tensor for name, tensor in decoder.items() if _is_projection(name) and len(tensor.shape) == 2}
    queries = _features(projections, "q_proj")
    if not queries or not _features(projections, "o_proj"):
        raise SetupError(
            f"{folder} is a {architecture}, whose attention has no q_proj and o_proj of its own: adapters and memory "
            "of such a model are unknown"
        )
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    # A checkpoint may hold both names of one matrix.
    doubled = sum(t.numbers for name, t in tensors.items() if tied and name.endswith("lm_head.weight"))
    beside = sum(tensor.numbers for name, tensor in tensors.items() if name not in decoder)
    speculative = sum(tensor.numbers for name, tensor in tensors.items() if name.startswith("mtp."))
    everything = sum(tensor.numbers for tensor in tensors.values()) - doubled
    heads = _number(folder, text, "num_attention_heads")
    adapted = {name: tensor for name, tensor in projections.items() if not _EXPERT.search(name)}
    return ModelShape(
        name=folder.resolve().name,
        architecture=architecture,
        context_tokens=_number(folder, text, "max_position_embeddings"),
        dtype="float32" if all(t.dtype in _FLOAT32_TYPES for t in adapted.values()) else "bfloat16",
        parameters=everything - speculative,
        text_parameters=everything - beside,
        vocab=_number(folder, text, "vocab_size"),
        width=_number(folder, text, "hidden_size"),
        layers=_number(folder, text, "num_hidden_layers"),
        inner=_inner(folder, text, projections),
        query=max(queries.values()),
        key=max(_features(projections, "k_proj").values()),
        heads=heads,
        kv_heads=_integer(text.get("num_key_value_heads")) or heads,
        head_dim=_integer(text.get("head_dim")) or _number(folder, text, "hidden_size") // heads,
        tied=tied,
        head_norm=any(".q_norm." in name for name in decoder),
        lora=_lora(adapted),
        kv=_kv(text, projections),
        experts=_experts(text),
        chat=chat,
    )


def _decoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def is_beside(name: str) -> bool:
        words = name.split(".")[:3]
        return any(word.startswith(_BESIDE_TEXT) for word in words)

    return {name: tensor for name, tensor in tensors.items() if not is_beside(name)}


def _is_projection(name: str) -> bool:
    words = name.split(".")
    return len(words) >= 2 and words[-1] == "weight" and words[-2] in COLUMN_PROJECTIONS + ROW_PROJECTIONS


def _features(projections: Mapping[str, Tensor], which: str) -> dict[int, int]:
    """Layer → output features of this projection, without those of experts."""
    found: dict[int, int] = {}
    for name, tensor in projections.items():
        placed = _LAYER.search(name)
        if placed and name.split(".")[-2] == which and not _EXPERT.search(name):
            layer = int(placed[1])
            found[layer] = max(found.get(layer, 0), tensor.shape[0])
    return found


def _inner(folder: Path, text: Mapping[str, object], projections: Mapping[str, Tensor]) -> int:
    dense = _features(projections, "gate_proj")
    active = _integer(text.get("num_experts_per_tok")) or _integer(text.get("top_k_experts"))
    routed = active * (_integer(text.get("moe_intermediate_size")) or _integer(text.get("intermediate_size")))
    if not _experts(text):
        return max(dense.values(), default=0) or _number(folder, text, "intermediate_size")
    # Beside the routed experts: a shared one, or in some families' first layers a dense MLP instead of them.
    return max(dense.values(), default=0) + routed


def _experts(text: Mapping[str, object]) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return max((_integer(text.get(name)) for name in names), default=0)


def _lora(adapted: Mapping[str, Tensor]) -> LoraShape:
    columns = [tensor.shape for name, tensor in adapted.items() if name.split(".")[-2] in COLUMN_PROJECTIONS]
    rows = [tensor.shape for name, tensor in adapted.items() if name.split(".")[-2] in ROW_PROJECTIONS]
    return LoraShape(
        column_in=sum(shape[1] for shape in columns),
        column_out=sum(shape[0] for shape in columns),
        row_in=sum(shape[1] for shape in rows),
        row_out=sum(shape[0] for shape in rows),
        weights=sum(tensor.numbers for tensor in adapted.values()),
        largest=max(tensor.numbers for tensor in adapted.values()),
    )


def _kv(text: Mapping[str, object], projections: Mapping[str, Tensor]) -> KvShape:
    keys, values = _features(projections, "k_proj"), _features(projections, "v_proj")
    window = _window(text)
    sizes = {"full": 0, "sliding": 0}
    for layer, key in keys.items():
        # Keys and values are both cached, even if the keys serve as values too.
        sizes["sliding" if _is_sliding(text, layer, window) else "full"] += key + values.get(layer, key)
    linear = _integer(text.get("num_hidden_layers")) - len(keys) if text.get("linear_num_value_heads") else 0
    return KvShape(sizes["full"], sizes["sliding"], window, linear * _linear_state(text))


def _window(text: Mapping[str, object]) -> int:
    return 0 if text.get("use_sliding_window") is False else _integer(text.get("sliding_window"))


def _is_sliding(text: Mapping[str, object], layer: int, window: int) -> bool:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return window > 0 and kinds[layer] == "sliding_attention"
    pattern = _integer(text.get("sliding_window_pattern"))
    if pattern:
        return window > 0 and (layer + 1) % pattern != 0
    return window > 0


def _linear_state(text: Mapping[str, object]) -> int:
    """Numbers that one layer of gated delta nets keeps of a sequence; two bytes each, so float32 counts twice."""
    key_dim, value_dim = _integer(text.get("linear_key_head_dim")), _integer(text.get("linear_value_head_dim"))
    key_heads, value_heads = _integer(text.get("linear_num_key_heads")), _integer(text.get("linear_num_value_heads"))
    recurrent = 2 * value_heads * key_dim * value_dim
    convolved = (2 * key_heads * key_dim + value_heads * value_dim) * (_integer(text.get("linear_conv_kernel_dim")) - 1)
    return recurrent + convolved


def _number(folder: Path, text: Mapping[str, object], name: str) -> int:
    found = _integer(text.get(name))
    if found <= 0:
        raise SetupError(f"{folder / 'config.json'} does not describe a language model, {name} is missing: {_NO_MODEL}")
    return found


def _integer(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _list(config: Mapping[str, object], name: str) -> list[object]:
    value = config.get(name)
    return value if isinstance(value, list) else []


def _table(config: Mapping[str, object], name: str) -> dict[str, object]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}
