"""Memory of one vLLM on each of its GPUs, or in the machine's memory.

Letters as in `clawloop.layout.trainer`. References are to vllm 0.32.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from clawloop.layout.model_shape import ModelShape
from clawloop.layout.parts import GIB, MIB, Part, PartName
from clawloop.layout.request import Request

# On an H200 an eager engine of a 4B model took 11 MiB more than all of its parts (measured). With
# two GPUs vLLM reports up to 1.8 GiB more (vllm PR 10511).
CUDA_RUNTIME = 768 * MIB
NCCL_BUFFERS = 2 * GIB
# vLLM's log of 86 graphs of a Qwen3.5 says 0.73 GiB (vllm PR 39559).
GRAPH_BYTES = 9 * MIB
LARGEST_GRAPH = 512
# Bytes for each request and id of the vocabulary while vLLM tries the sampler at its start: logits, sorted logits and
# their int64 places, probabilities, log-probs (`v1/sample`). 256 requests over 152k ids are 1.45 GiB by vLLM's logs.
SAMPLER_BYTES = 40
_MOST_TOKENS = 2**40
UTILIZATION = 0.92
"""vLLM's own default of `--gpu-memory-utilization`."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Limits on the work of one engine step.

    Args:
        seqs: requests, its `--max-num-seqs`.
        batched_tokens: tokens of their prompts and replies, its `--max-num-batched-tokens`.
        block_tokens: of a block of the KV cache.
    """

    seqs: int
    batched_tokens: int
    block_tokens: int = 16


LARGE_GPU = Serving(seqs=256, batched_tokens=8192)
"""vLLM's defaults for GPUs of 70 GiB and more, except that its number of requests is 1024."""
LARGE_FROM = 40 * GIB
SMALL_GPU = Serving(seqs=64, batched_tokens=2048)
"""vLLM's default tokens for smaller GPUs, and fewer requests, since each needs memory for the vocabulary's logits."""


CHATS_LEAVE = 8
"""Chats leave one of this many sequences free for judgements and for questions of the gate and of probes."""
GRAMMARS = 4
"""Grammars of clients that an engine may compile before a judge's, each for 10 s at most."""


def chats_of_gateway(seqs: int, gateways: int) -> int:
    """Sequences of an engine that each of so many gateways may use for chats, so that all leave an eighth free.

    A fixed share of each, because connections are spread over gateways by the kernel, and no chat waits for another
    process.
    """
    return max(1, (seqs - -(-seqs // CHATS_LEAVE)) // gateways)


def probes_at_once(seqs: int) -> int:
    """Probes that an engine is asked at the same time: as many as chats leave free, or two."""
    return max(2, seqs // CHATS_LEAVE)


def grammars_of_gateway(cores: int, gateways: int) -> int:
    """Grammars that each of so many gateways may have an engine compile at once.

    vLLM 0.32 compiles on half of the machine's cores, first come first served, judges' grammars too: one of five or
    more threads stays free. On fewer threads, `GRAMMARS` in all: a gateway learns that a grammar is compiled only by
    the first token, or by the whole reply if it is not streamed, so requests would wait for each other's replies.

    Args:
        cores: of the engine's machine.
    """
    threads = (cores + 1) // 2
    return max(1, max(GRAMMARS, threads - 1) // gateways)


def on_cpu(max_model_len: int) -> Serving:
    """A prompt is read whole there: `clawloop.layout.on_cpu` says why."""
    return Serving(seqs=64, batched_tokens=max_model_len, block_tokens=128)


def weight_bytes(model: ModelShape, number_bytes: int, gpus: int = 1) -> int:
    """All weights, cut by tensor parallelism; norms, which are not cut, are left out of account."""
    whole = model.parameters * number_bytes if model.stored_bytes is None else model.stored_bytes
    return -(-whole // gpus)


def weight_words(request: Request) -> str:
    """Number of weights and their data type, for people."""
    quantised = "" if request.model.quantised is None else f"{request.model.quantised} and "
    return f"{request.model.parameters:,} in {quantised}{request.dtype}"


def packed_vocabulary(model: ModelShape, number_bytes: int) -> int:
    """On a CPU the matrices that read tokens and that predict them are kept, and each is packed once more for oneDNN,
    also where they are one and the same (`layers.vocab_parallel_embedding`).

    Other projections are packed in place of the weights (`layers.utils.dispatch_cpu_unquantized_gemm`).
    """
    return 2 * model.vocab * model.width * number_bytes


def lora_slots(model: ModelShape, loras: int, rank: int, number_bytes: int, gpus: int = 1) -> int:
    """max_loras · rank · Σ(in + out) · b over all adapted projections, whether used or not.

    Of q, k, v, gate and up, A is whole on each GPU and B is cut; of o and down, A is cut and B is whole
    (`lora.layers.*.create_lora_weights`, without `--fully-sharded-loras`).
    """
    shape = model.lora
    whole, cut = shape.column_in + shape.row_out, shape.column_out + shape.row_in
    return loras * rank * (whole + -(-cut // gpus)) * number_bytes


def loaded_loras(model: ModelShape, loras: int, rank: int, number_bytes: int) -> int:
    """Adapters kept in the machine's memory, of the rank they have (`lora.lora_model`)."""
    return loras * model.lora.parameters(rank) * number_bytes


def kv_bytes(request: Request, tokens: int, serving: Serving, gpus: int = 1) -> int:
    """Keys and values of so many tokens in whole blocks, and the block that vLLM keeps empty.

    Heads of keys are cut by tensor parallelism, but none is cut itself.
    """
    model, blocks = request.model, -(-tokens // serving.block_tokens) + 1
    numbers = model.kv.numbers(blocks * serving.block_tokens, serving.batched_tokens)
    return -(-numbers * request.number_bytes // min(gpus, model.kv_heads))


def kv_tokens(request: Request, size: int, serving: Serving, gpus: int = 1) -> int:
    """The most tokens that a KV cache of this size holds as one sequence."""
    low, high = 0, 2
    while kv_bytes(request, high, serving, gpus) <= size and high < _MOST_TOKENS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if kv_bytes(request, middle, serving, gpus) <= size else (low, middle)
    return low


def cache_part(request: Request, size: int, serving: Serving, gpus: int = 1) -> Part:
    tokens, context = kv_tokens(request, size, serving, gpus), request.limits.max_model_len
    return Part(PartName.KV, size, f"{tokens:,} tokens; one context is {context:,}")


def reading_bytes(model: ModelShape, serving: Serving, number_bytes: int, gpus: int = 1) -> int:
    """One forward pass over a full batch, or the sampler over all requests: vLLM tries both at its start.

    A layer at a time: residual, hidden state and its norm (3·D·b), and gate, up and their product or queries, keys,
    values and what attention gave.
    """
    wide = max(3 * model.inner, 2 * model.query + 2 * model.key)
    batch = serving.batched_tokens * number_bytes * (3 * model.width + -(-wide // gpus))
    return max(batch, serving.seqs * model.vocab * SAMPLER_BYTES)


def graph_bytes(serving: Serving, *, with_lora: bool) -> int:
    """A graph for each batch size up to twice the requests, one more for each up to the requests themselves; all of
    them once more for batches without an adapter."""
    several = min(2 * serving.seqs, LARGEST_GRAPH)
    count = _sizes(several) + _sizes(min(serving.seqs, several))
    return count * (2 if with_lora else 1) * GRAPH_BYTES


def _sizes(largest: int) -> int:
    """Batch sizes that get a graph: 1, 2, 4, then every 8th below 256, then every 16th (`config.vllm`)."""
    small = [size for size in (1, 2, 4) if size <= largest]
    return len(small) + len(range(8, min(largest + 1, 256), 8)) + len(range(256, largest + 1, 16))


def parts_beside_cache(request: Request, serving: Serving, gpus: int, *, with_lora: bool = True) -> tuple[Part, ...]:
    """Memory that an engine needs on each GPU beside its KV cache."""
    model, limits, b = request.model, request.limits, request.number_bytes
    cut = f" / {gpus} GPUs" if gpus > 1 else ""
    parts = [Part(PartName.WEIGHTS, weight_bytes(model, b, gpus), f"{weight_words(request)}{cut}")]
    if with_lora:
        slots = lora_slots(model, limits.max_loras, limits.max_lora_rank, b, gpus)
        parts.append(Part(PartName.LORA, slots, f"{limits.max_loras} of rank {limits.max_lora_rank}{cut}"))
    parts += [
        Part(
            PartName.READING,
            reading_bytes(model, serving, b, gpus),
            f"{serving.batched_tokens:,} tokens, or {serving.seqs} requests' logits",
        ),
        Part(PartName.GRAPHS, graph_bytes(serving, with_lora=with_lora), f"batches of 1 to {2 * serving.seqs}"),
        Part(
            PartName.RUNTIME,
            CUDA_RUNTIME + (NCCL_BUFFERS if gpus > 1 else 0),
            "CUDA's context" + (", NCCL" if gpus > 1 else ""),
        ),
    ]
    return tuple(parts)
