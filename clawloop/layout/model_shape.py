"""The facts about a model that decide how much memory it takes: its tensors' shapes, and a few fields of its config.

All of it is known without reading a weight, so a layout can be computed for a model that no GPU here could hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clawloop.families.chat_format import ChatFormat
from clawloop.families.thinking import Thinking

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
        chat: its template, and when it thinks.
    """

    name: str
    architecture: str
    context_tokens: int
    dtype: Literal["float32", "bfloat16"]
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
    stored_bytes: int | None = None
    quantised: str | None = None
    chat: ChatFormat = _PLAIN

    def takes_tensor_parallel(self, gpus: int) -> bool:
        """True if vLLM can split the model over `gpus`: its heads, key heads and MLP divide by it."""
        shares_keys = self.kv_heads % gpus == 0 or gpus % self.kv_heads == 0
        return self.heads % gpus == 0 and shares_keys and self.inner % gpus == 0
