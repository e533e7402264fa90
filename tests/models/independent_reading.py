"""A second reading of SmolLM2's GGUF file, from the format's description alone: numpy, float64, GGUF's own layout.

It shares nothing with `clawloop.app.models.gguf`: weights are read a row at a time, neighbours are rotated as
llama.cpp does, and text is cut into tokens by merging pairs one after another.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# GPT-2's words, with each digit alone.
_WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


class IndependentReading:
    def __init__(self, data: bytes):
        self.data = data
        self._at = 8
        tensors, facts = self._scalar(10), self._scalar(10)
        self.facts: dict[str, Any] = {}
        for _ in range(facts):
            name = self._string()
            self.facts[name] = self._any(self._scalar(4))
        self.places: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(tensors):
            name = self._string()
            sizes = [self._scalar(10) for _ in range(self._scalar(4))]
            self.places[name] = (sizes, self._scalar(4), self._scalar(10))
        self.begin = self._at + (-self._at) % 32
        self.ids = {token: index for index, token in enumerate(self.facts["tokenizer.ggml.tokens"])}
        self.ranks = {merge: rank for rank, merge in enumerate(self.facts["tokenizer.ggml.merges"])}

    def _scalar(self, kind: int) -> Any:
        form = _SCALARS[kind]
        [value] = struct.unpack_from(form, self.data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        size = self._scalar(10)
        found = self.data[self._at : self._at + size].decode()
        self._at += size
        return found

    def _any(self, kind: int) -> Any:
        if kind == 8:
            return self._string()
        if kind == 9:
            of = self._scalar(4)
            return [self._any(of) for _ in range(self._scalar(10))]
        return self._scalar(kind)

    def rows(self, name: str, rows: Sequence[int] | None = None) -> Array:
        """Rows of a matrix, or a vector, of one of the formats F32, Q4_1 and Q8_0."""
        sizes, kind, place = self.places[name]
        width, count = sizes[0], (sizes[1] if len(sizes) > 1 else 1)
        size = {0: 4 * width, 3: width // 32 * 20, 8: width // 32 * 34}[kind]
        found = np.empty((count if rows is None else len(rows), width))
        for index, row in enumerate(range(count) if rows is None else rows):
            at = self.begin + place + row * size
            raw = self.data[at : at + size]
            found[index] = np.frombuffer(raw, "<f4") if kind == 0 else self._dequantised(raw, kind)
        return found if len(sizes) > 1 else found[0]

    @staticmethod
    def _dequantised(raw: bytes, kind: int) -> Array:
        if kind == 8:
            blocks = np.frombuffer(raw, np.uint8).reshape(-1, 34)
            scale = blocks[:, :2].copy().view("<f2").astype(float)
            scaled: Array = scale * blocks[:, 2:].view(np.int8)
            return scaled.ravel()
        blocks = np.frombuffer(raw, np.uint8).reshape(-1, 20)
        scale, least = blocks[:, :2].copy().view("<f2").astype(float), blocks[:, 2:4].copy().view("<f2").astype(float)
        out = np.empty((len(blocks), 32))
        for place in range(16):
            out[:, place] = blocks[:, 4 + place] % 16
            out[:, place + 16] = blocks[:, 4 + place] // 16
        found: Array = scale * out + least
        return found.ravel()

    def logprobs(self, ids: Sequence[int]) -> Array:
        """[len(ids), vocabulary]: log-probs of what follows each token."""
        facts = self.facts
        heads, groups = facts["llama.attention.head_count"], facts["llama.attention.head_count_kv"]
        epsilon = facts["llama.attention.layer_norm_rms_epsilon"]
        size = facts["llama.embedding_length"] // heads
        angles = np.outer(np.arange(len(ids)), facts["llama.rope.freq_base"] ** (-np.arange(0, size, 2) / size))
        turns = np.exp(1j * angles)[:, None, :]

        def norm(x: Array, name: str) -> Array:
            scaled: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * self.rows(name)
            return scaled

        def turned(x: Array) -> Array:
            pairs = (x[..., ::2] + 1j * x[..., 1::2]) * turns
            return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)

        hidden = self.rows("token_embd.weight", ids)
        for layer in range(facts["llama.block_count"]):
            inner, at = f"blk.{layer}", norm(hidden, f"blk.{layer}.attn_norm.weight")
            q, k, v = (at @ self.rows(f"{inner}.attn_{name}.weight").T for name in "qkv")
            q = turned(q.reshape(len(ids), heads, size))
            k = turned(k.reshape(len(ids), groups, size))
            v = v.reshape(len(ids), groups, size)
            gathered = np.empty_like(q)
            for head in range(heads):
                group = head * groups // heads
                scores = q[:, head] @ k[:, group].T / np.sqrt(size)
                scores[np.triu_indices(len(ids), 1)] = -np.inf
                shares = np.exp(scores - scores.max(-1, keepdims=True))
                gathered[:, head] = shares / shares.sum(-1, keepdims=True) @ v[:, group]
            hidden = hidden + gathered.reshape(len(ids), -1) @ self.rows(f"{inner}.attn_output.weight").T
            at = norm(hidden, f"{inner}.ffn_norm.weight")
            gate, up = (at @ self.rows(f"{inner}.ffn_{name}.weight").T for name in ("gate", "up"))
            hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ self.rows(f"{inner}.ffn_down.weight").T
        logits = norm(hidden, "output_norm.weight") @ self.rows("token_embd.weight").T
        logits -= logits.max(-1, keepdims=True)
        found: Array = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return found

    def tokens(self, text: str) -> list[int]:
        """Ids of a text without control tokens."""
        found: list[int] = []
        for word in _WORDS.findall(text):
            parts = [_CHARACTERS[byte] for byte in word.encode()]
            while len(parts) > 1:
                pairs = [self.ranks.get(f"{a} {b}", len(self.ranks)) for a, b in pairwise(parts)]
                best = min(range(len(pairs)), key=lambda index: pairs[index])
                if pairs[best] == len(self.ranks):
                    break
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            found += [self.ids[part] for part in parts]
        return found


def _byte_characters() -> dict[int, str]:
    """GPT-2's character for each byte: itself where it is seen, else one from 256 on."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


_CHARACTERS = _byte_characters()
