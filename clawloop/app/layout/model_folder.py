"""A model folder: the shapes of its tensors, also quantised, and what a copy to serve needs. Reads no weight."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from clawloop.core.errors import SetupError
from clawloop.core.families.chat_format import ChatFormat, ChatOptions, read_chat_format
from clawloop.core.families.template import Thinking, read_template
from clawloop.training.model.checkpoint import packs_documents
from clawloop.training.options import Dtype

# Shapes ---------------------------------------------------------------------------------------------------------------
# The facts about a model that decide how much memory it takes: its tensors' shapes, and a few fields of its config.
#
# All of it is known without reading a weight, so a layout can be computed for a model that no GPU here could hold.

_PLAIN = ChatFormat(Thinking.NEVER, None, None)


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The summed sizes of the projections that adapters are put on, at rank 1.

    Args:
        column_in, column_out: input and output features of q, k, v, gate and up, which tensor parallelism cuts by
            their outputs.
        row_in, row_out: of o and down, which it cuts by their inputs.
        weights: of those projections themselves, which QLoRA keeps in 4 bits.
        largest: weights of the largest of them.
    """

    column_in: int
    column_out: int
    row_in: int
    row_out: int
    weights: int
    largest: int

    def parameters(self, rank: int) -> int:
        """Weights of one adapter: A is [rank, in], B is [out, rank]."""
        return rank * (self.column_in + self.column_out + self.row_in + self.row_out)


@dataclass(frozen=True, slots=True)
class KvShape:
    """Size of the KV cache, in numbers (not bytes).

    Args:
        full: keys and values of one token in the layers that attend to all of a context.
        sliding: in the layers that attend to a window; of no more than `window` tokens and those of one batch.
        window: tokens.
        state: of one sequence in layers of linear attention, float32 recurrent state and convolution together.
    """

    full: int
    sliding: int = 0
    window: int = 0
    state: int = 0

    def numbers(self, tokens: int, batched_tokens: int) -> int:
        """Numbers that a sequence of `tokens` takes."""
        return self.full * tokens + self.sliding * min(tokens, self.window + batched_tokens) + self.state


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's size and architecture, as its folder gives them.

    Args:
        name: the folder's; what the engine calls the base model.
        architecture: as in `config.json`, e.g. `Qwen3ForCausalLM`.
        context_tokens: positions it was made for.
        dtype: in which its weights are stored, float32 or bfloat16.
        parameters: weights the engine loads, towers for images and sound included.
        stored_bytes: of these in the folder, where they are quantised; None: they are not.
        quantised: how they are, as `config.json` names the method, e.g. `awq`.
        text_parameters: weights the trainer loads.
        vocab, width, layers: sizes of the decoder.
        inner: features of the widest MLP that one token passes; of mixtures, all its active experts together.
        query, key: features of the widest layer's queries and keys.
        heads, kv_heads, head_dim: of attention.
        tied: the vocabulary's matrix reads tokens and predicts them.
        head_norm: queries and keys are normalised by head.
        experts: routed experts of a layer; 0 where there are none.
        packs: its config has nothing with which the trainer cannot pack samples, but maybe a window.
        chat: its template, and when it thinks.
    """

    name: str
    architecture: str
    context_tokens: int
    dtype: Dtype
    parameters: int
    text_parameters: int
    vocab: int
    width: int
    layers: int
    inner: int
    query: int
    key: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    head_norm: bool
    lora: LoraShape
    kv: KvShape
    experts: int = 0
    packs: bool = True
    stored_bytes: int | None = None
    quantised: str | None = None
    chat: ChatFormat = _PLAIN

    def takes_tensor_parallel(self, gpus: int) -> bool:
        """True if vLLM can split the model over `gpus`: its heads, key heads and MLP divide by it."""
        shares_keys = self.kv_heads % gpus == 0 or gpus % self.kv_heads == 0
        return self.heads % gpus == 0 and shares_keys and self.inner % gpus == 0


# Quantised tensors ----------------------------------------------------------------------------------------------------
# Quantised tensors of a model folder, as the weights that they stand for: their shapes, and the bytes they take.
#
# AWQ and GPTQ store a projection as `qweight`, eight 4-bit weights in a word, with `scales` for groups of inputs;
# compressed-tensors as `weight_packed` with `weight_scale`; FP8 as `weight`, a byte each, with a scale or some.

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
    """Bits of a quantised weight: one number with AWQ and GPTQ, with compressed-tensors that of all groups."""
    found = [quantisation.get("bits")]
    groups = quantisation.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        found.append(weights.get("num_bits") if isinstance(weights, dict) else None)
    bits = {number for number in found if isinstance(number, int) and number > 0}
    if len(bits) != 1:
        raise SetupError(f"{folder} does not give the bits of {module}: its memory cannot be computed")
    return bits.pop()


# Folders --------------------------------------------------------------------------------------------------------------
# A model folder → its shape: `config.json` and the headers of its safetensors files, never a weight.
#
# Projections are found by their names (`q_proj`, …) and sizes by their tensors, so that every family that keeps its
# projections apart is understood, whatever its config calls things; and one that keeps q, k and v in one `qkv_proj`.

COLUMN_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PROJECTIONS = ("o_proj", "down_proj")
_FUSED = "qkv_proj"
_NO_MODEL = "give the folder of a model in Hugging Face's layout: --model DIR"
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


def require_known_attention(folder: Path, tensors: Collection[str]) -> None:
    """Check a model by the names of its tensors, as its index has them before its weights are there.

    Raises:
        SetupError: no layout is known for its attention.
    """
    words = {word for name in tensors for word in name.split(".")}
    if "o_proj" not in words or words.isdisjoint(("q_proj", _FUSED)):
        raise _unknown_attention(folder, str(_list(_config(folder), "architectures")[0]))


def _unknown_attention(folder: Path, architecture: str) -> SetupError:
    return SetupError(
        f"{folder} is a {architecture}, whose attention has no q_proj and o_proj of its own: adapters and memory "
        "of such a model are unknown"
    )


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
    heads = _number(folder, text, "num_attention_heads")
    kv_heads = _integer(text.get("num_key_value_heads")) or heads
    head_dim = _integer(text.get("head_dim")) or _number(folder, text, "hidden_size") // heads
    decoder = _decoder_tensors(tensors)
    apart = _unfused(decoder, heads * head_dim, kv_heads * head_dim)
    projections = {name: tensor for name, tensor in apart.items() if _is_projection(name) and len(tensor.shape) == 2}
    queries = _features(projections, "q_proj")
    if not queries or not _features(projections, "o_proj"):
        raise _unknown_attention(folder, architecture)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    # A checkpoint may hold both names of one matrix.
    doubled = sum(t.numbers for name, t in tensors.items() if tied and name.endswith("lm_head.weight"))
    beside = sum(tensor.numbers for name, tensor in tensors.items() if name not in decoder)
    speculative = sum(tensor.numbers for name, tensor in tensors.items() if name.startswith("mtp."))
    everything = sum(tensor.numbers for tensor in tensors.values()) - doubled
    # A fused matrix gets none: engines are told the names of those that are apart.
    adapted = {name: tensor for name, tensor in projections.items() if name in decoder and not _EXPERT.search(name)}
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
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=tied,
        head_norm=any(".q_norm." in name for name in decoder),
        lora=_lora(adapted),
        kv=_kv(text, projections),
        experts=_experts(text),
        packs=packs_documents(folder, max_tokens=1),  # no window is shorter
        chat=chat,
    )


def _decoder_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def is_beside(name: str) -> bool:
        words = name.split(".")[:3]
        return any(word.startswith(_BESIDE_TEXT) for word in words)

    return {name: tensor for name, tensor in tensors.items() if not is_beside(name)}


def _unfused(tensors: Mapping[str, Tensor], query: int, key: int) -> dict[str, Tensor]:
    """The tensors, with q, k and v apart where they are one matrix in this order, as in Phi-3.

    Args:
        query, key: features of all heads, and of all heads of keys.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if not name.endswith(f".{_FUSED}.weight") or tensor.shape[0] != query + 2 * key:
            found[name] = tensor
            continue
        attention = module.removesuffix(_FUSED)
        for which, features in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
            found[f"{attention}{which}.{kind}"] = Tensor((features, *tensor.shape[1:]), tensor.dtype)
    return found


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


# Copies for engines ---------------------------------------------------------------------------------------------------
# The quantised copy of a trained model that engines serve: that it is a copy.
#
# An engine with another tokenizer or template would answer, and every sample would be trained as something it was not.

_OPTION = "--serve-model"
_REMEDY = "give a quantised copy of the model in --model"
_SIZES = {
    "architecture": "architecture",
    "vocab": "token ids",
    "layers": "layers",
    "width": "features",
    "heads": "heads",
    "kv_heads": "heads of keys",
    "lora": "adapted projections",
}


def read_served_copy(folder: Path, model: Path, shape: ModelShape, chat: ChatOptions | None = None) -> ModelShape:
    """Shape of the served model: that of the trained model, with the stored bytes of its quantised copy.

    Args:
        folder: the copy's.
        model, shape: of the trained model.
        chat: what an operator sets for both.

    Raises:
        SetupError: a folder is no complete model, or the copy is not quantised, or not of this model.
    """
    copy = read_model_shape(folder, chat)
    if copy.quantised is None:
        raise SetupError(f"{_OPTION}: {folder} is not quantised: {_REMEDY}, or leave it out")
    for difference in _differences(folder, copy, model, shape, chat):
        raise SetupError(f"{_OPTION}: {folder} is no copy of {shape.name}: {difference}: {_REMEDY}")
    return replace(shape, stored_bytes=copy.stored_bytes, quantised=copy.quantised)


def require_trainable_weights(shape: ModelShape) -> None:
    """
    Raises:
        SetupError: they are quantised.
    """
    if shape.quantised is not None:
        raise SetupError(
            f"--model: {shape.name} has weights quantised by {shape.quantised}, which are served and not trained: give "
            f"the unquantised model to --model and this one to {_OPTION}; or serve and record it only: --no-train"
        )


def _differences(
    folder: Path, copy: ModelShape, model: Path, shape: ModelShape, chat: ChatOptions | None
) -> Iterator[str]:
    for name, word in _SIZES.items():
        theirs, ours = getattr(copy, name), getattr(shape, name)
        if theirs != ours:
            yield f"it has other {word}" if name == "lora" else f"{word} {theirs}, not {ours}"
    if _token_ids(folder) != _token_ids(model):
        yield "its tokenizer.json gives tokens other ids"
    if (chat is None or chat.template is None) and read_template(folder).strip() != read_template(model).strip():
        yield "its chat template is another (--chat-template FILE sets one for both)"


def _token_ids(folder: Path) -> object:
    """Ids of all tokens; None if the folder has no `tokenizer.json`.

    Raises:
        SetupError: it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        return content.get("model", {}).get("vocab"), added
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(f"{path} cannot be read: {error}: download the model again, completely") from error
