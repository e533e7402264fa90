"""Writes the model of a GGUF file as a folder in Hugging Face's layout: weights, config, tokenizer, chat template.

It reads what SmolLM2's file has, and refuses everything else: the architecture `llama`, tensors in F32, Q4_1 and Q8_0,
a byte-level BPE. Weights become float32, in which each quantised value is exact. Format: ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from clawloop.core.errors import SetupError

Value = bool | int | float | str | list["Value"]
Weights = NDArray[np.float32]

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_CONTROL = 3
"""A token's type that says: it is never written by text."""
_BLOCK = 32
"""Weights that share a scale, in Q4_1 and Q8_0."""
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


# The file -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the file has it.

    Args:
        shape: outputs first; the file lists them last.
        kind: the number of its format.
        start: of its bytes in the file.
    """

    shape: tuple[int, ...]
    kind: int
    start: int


class _Reader:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        found: int = value
        return found

    def text(self) -> str:
        size = self.number("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Value:
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            of = self.number("I")
            return [self.value(of) for _ in range(self.number("Q"))]
        return self.number(_NUMBERS[kind])


class Gguf:
    """A GGUF file in memory.

    Raises:
        SetupError: it is none, or it is damaged.
    """

    def __init__(self, data: bytes):
        self.data = data
        self.facts: dict[str, Value] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._read(_Reader(data))
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise SetupError(f"the GGUF file is damaged: {error}") from error

    def _read(self, reader: _Reader) -> None:
        if self.data[:4] != b"GGUF":
            raise SetupError("the file is no GGUF file")
        reader.at = 4
        reader.number("I")  # its version, 2 or 3, which differ in nothing that is read here
        tensors, facts = reader.number("Q"), reader.number("Q")
        for _ in range(facts):
            name = reader.text()
            self.facts[name] = reader.value(reader.number("I"))
        for _ in range(tensors):
            name = reader.text()
            sizes = [reader.number("Q") for _ in range(reader.number("I"))]
            self.tensors[name] = StoredTensor(tuple(reversed(sizes)), reader.number("I"), reader.number("Q"))
        align = self.integer("general.alignment", 32)
        begin = -(-reader.at // align) * align
        for name, tensor in self.tensors.items():
            self.tensors[name] = StoredTensor(tensor.shape, tensor.kind, begin + tensor.start)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.facts.get(name, default)
        if not isinstance(value, int):
            raise SetupError(f"the GGUF file does not say {name}")
        return value

    def number(self, name: str) -> float:
        value = self.facts.get(name)
        if not isinstance(value, (int, float)):
            raise SetupError(f"the GGUF file does not say {name}")
        return value

    def text(self, name: str) -> str:
        value = self.facts.get(name)
        if not isinstance(value, str):
            raise SetupError(f"the GGUF file does not say {name}")
        return value

    def strings(self, name: str) -> list[str]:
        return [str(value) for value in self._list(name)]

    def integers(self, name: str) -> list[int]:
        return [value for value in self._list(name) if isinstance(value, int)]

    def _list(self, name: str) -> list[Value]:
        value = self.facts.get(name)
        if not isinstance(value, list):
            raise SetupError(f"the GGUF file does not say {name}")
        return value

    def weights(self, name: str) -> Weights:
        """A tensor's values, float32 in its shape.

        Raises:
            SetupError: it is in a format that is not read here, or the file ends before it does.
        """
        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        try:
            values = _FORMATS[tensor.kind](self.data, tensor.start, count)
        except KeyError:
            raise SetupError(f"{name} is in GGUF's format {tensor.kind}, which is not read here") from None
        except ValueError as error:
            raise SetupError(f"the GGUF file is damaged: {error}") from error
        return values.reshape(tensor.shape)


def _f32(data: bytes, start: int, count: int) -> Weights:
    return np.frombuffer(data, "<f4", count, start).astype(np.float32)


def _q8_0(data: bytes, start: int, count: int) -> Weights:
    """Blocks of a scale d and 32 signed bytes q: d·q."""
    blocks = np.frombuffer(data, np.dtype([("d", "<f2"), ("q", "i1", _BLOCK)]), count // _BLOCK, start)
    values: Weights = blocks["d"].astype(np.float32)[:, None] * blocks["q"].astype(np.float32)
    return values


def _q4_1(data: bytes, start: int, count: int) -> Weights:
    """Blocks of a scale d, a least value m and 16 bytes, whose lower halves are the first 16 q: d·q + m."""
    form = np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", _BLOCK // 2)])
    blocks = np.frombuffer(data, form, count // _BLOCK, start)
    halves = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
    values: Weights = blocks["d"].astype(np.float32)[:, None] * halves + blocks["m"].astype(np.float32)[:, None]
    return values


_FORMATS = {0: _f32, 3: _q4_1, 8: _q8_0}


# The folder -----------------------------------------------------------------------------------------------------------


def write_model_folder(gguf: Gguf, folder: Path) -> None:
    """Write the file's model into an existing, empty folder.

    Raises:
        SetupError: the file has something that is not read here.
        OSError: the folder cannot be written to.
    """
    architecture = gguf.text("general.architecture")
    if architecture != "llama":
        raise SetupError(f"the GGUF file has a model of the architecture {architecture}, which is not read here")
    heads = gguf.integer("llama.attention.head_count")
    kv_heads = gguf.integer("llama.attention.head_count_kv", heads)
    weights = {}
    for name in gguf.tensors:
        values, module = gguf.weights(name), name.split(".")[-2]
        if module in ("attn_q", "attn_k"):
            values = _halved(values, heads if module == "attn_q" else kv_heads)
        weights[_their_name(name)] = values
    _write_weights(weights, folder / "model.safetensors")
    tied = "output.weight" not in gguf.tensors
    _write_json(folder / "config.json", _config(gguf, heads, kv_heads, tied=tied))
    _write_tokenizer(gguf, folder)


def _write_weights(weights: dict[str, Weights], path: Path) -> None:
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # Its writer tells an error of the system in words alone: "I/O error: No space left on device (os error 28)".
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def _their_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, layer, module, kind = name.split(".")
    return f"model.layers.{layer}.{_MODULES[module]}.{kind}"


def _halved(values: Weights, heads: int) -> Weights:
    """Rows of each head in two halves: GGUF rotates neighbours, Hugging Face's models a feature and one half a head
    away."""
    rows, columns = values.shape
    return np.ascontiguousarray(values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2)).reshape(
        rows, columns
    )


def _config(gguf: Gguf, heads: int, kv_heads: int, *, tied: bool) -> dict[str, object]:
    base = gguf.number("llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": gguf.integer("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": gguf.integer("tokenizer.ggml.eos_token_id"),
        "head_dim": gguf.integer("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "hidden_size": gguf.integer("llama.embedding_length"),
        "intermediate_size": gguf.integer("llama.feed_forward_length"),
        "max_position_embeddings": gguf.integer("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": gguf.integer("llama.block_count"),
        "num_key_value_heads": kv_heads,
        "pad_token_id": gguf.integer("tokenizer.ggml.padding_token_id"),
        # The file has it in float32: 9.999999747e-06.
        "rms_norm_eps": round(gguf.number("llama.attention.layer_norm_rms_epsilon"), 9),
        "rope_parameters": {"rope_theta": base, "rope_type": "default"},
        "rope_theta": base,
        "tie_word_embeddings": tied,
        "vocab_size": gguf.integer("llama.vocab_size"),
    }


def _write_tokenizer(gguf: Gguf, folder: Path) -> None:
    kind = gguf.text("tokenizer.ggml.model"), gguf.text("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise SetupError(f"the GGUF file has a tokenizer {' of '.join(kind)}, which is not read here")
    tokens = gguf.strings("tokenizer.ggml.tokens")
    merges = [(first, second) for first, second in (m.split(" ") for m in gguf.strings("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # Digits one by one, then GPT-2's words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = gguf.integers("tokenizer.ggml.token_type")
    control = [token for token, of in zip(tokens, kinds, strict=True) if of == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {role: gguf.integer(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
    pad = gguf.integer("tokenizer.ggml.padding_token_id")
    config: Mapping[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos"]],
        "eos_token": tokens[ids["eos"]],
        "pad_token": tokens[pad],
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf.integer("llama.context_length"),
    }
    _write_json(folder / "tokenizer_config.json", config)
    (folder / "chat_template.jinja").write_text(gguf.text("tokenizer.chat_template"), encoding="utf-8")
    generation = {f"{role}_token_id": index for role, index in ids.items()} | {"pad_token_id": pad}
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
