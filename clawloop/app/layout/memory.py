"""Memory of one engine and of one rank of the trainer, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from clawloop.app.layout.model_folder import ModelShape
from clawloop.app.layout.request import Request, TrainingNeeds
from clawloop.training.model.checkpoint import SUPPORTED
from clawloop.training.options import RankWeights

# Parts ----------------------------------------------------------------------------------------------------------------
# A layout: which process is where, and what each part of its memory is for.

GIB = 2**30
MIB = 2**20


class Role(StrEnum):
    ENGINE = "engine"
    JUDGE = "judge engine"
    TRAINER = "trainer"
    SERVICE = "service"
    """Gateway, workers, databases: no model in it."""


class PartName(StrEnum):
    """A purpose that memory is used for."""

    WEIGHTS = "base weights"
    LORA = "LoRA slots"
    KV = "KV cache"
    READING = "reading and sampling"
    """Buffers of an engine's forward pass and its sampler."""
    GRAPHS = "CUDA graphs"
    RUNTIME = "runtime"
    """Imports, CUDA's context, workspaces, buffers between GPUs."""
    ADAPTER = "adapter and AdamW"
    """LoRA weights, their gradient, both of AdamW's moments."""
    GATHERED = "gathered weights"
    """The whole weights of a layer, which FSDP gathers while the layer is computed."""
    UNPACKED = "unpacked weights"
    """The unpacked copy of a 4-bit base model's projection, and the temporary tensors of unpacking it."""
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    """Logits of one chunk of positions, less the memory of the layer that they reuse."""
    SLACK = "allocator"
    """Memory that torch's allocator holds but cannot use (fragmentation)."""


@dataclass(frozen=True, slots=True)
class Part:
    """Memory on each device of a process.

    Args:
        how: in numbers, what it was computed from.
    """

    name: PartName
    bytes: int
    how: str


@dataclass(frozen=True, slots=True)
class Process:
    """One process, or one that is made of several (an engine with tensor parallelism, a trainer's ranks).

    Args:
        name: e.g. `engine 0`, `trainer`.
        gpus: indices of the GPUs it is on, one for each of its ranks; none on a machine without.
        parts: memory on each of them.
        why: why it is there and not elsewhere, in one sentence.
        arguments: what follows from the layout for its command line.
        environment: variables it is started with.
        cached_tokens: an engine's.
    """

    name: str
    role: Role
    gpus: tuple[int, ...]
    parts: tuple[Part, ...]
    why: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    cached_tokens: int = 0

    @property
    def bytes(self) -> int:
        """Bytes on each device."""
        return sum(part.bytes for part in self.parts)

    def part(self, name: PartName) -> int:
        return sum(part.bytes for part in self.parts if part.name is name)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or the machine's memory where there is none.

    Args:
        name: e.g. `GPU 0`, `memory`.
        bytes: all of it.
        kept_free: of that, what no process is given.
    """

    name: str
    bytes: int
    kept_free: int

    @property
    def usable(self) -> int:
        return self.bytes - self.kept_free


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes of an installation and the devices they run on.

    Args:
        kind: whether processes are on GPUs or in the machine's memory.
        devices: in the order of their indices.
        ranks: how the trainer's ranks hold the base model: whole each, or divided among them; None for one rank, or
            none.
        max_model_len: tokens of a context.
        notes: what a person should know, a sentence each.
        version_bytes: of each adapter version on disk; 0 where nothing is trained.
    """

    kind: Literal["cuda", "cpu"]
    devices: tuple[Device, ...]
    processes: tuple[Process, ...]
    ranks: RankWeights | None
    max_model_len: int
    notes: tuple[str, ...]
    version_bytes: int = 0

    def on(self, device: int) -> tuple[Process, ...]:
        """The processes on this device."""
        if self.kind == "cpu":
            return self.processes
        return tuple(process for process in self.processes if device in process.gpus)

    def used(self, device: int) -> int:
        return sum(process.bytes for process in self.on(device))


def gibibytes(count: int) -> str:
    """E.g. `7.5 GiB`, `0.04 GiB`."""
    size = count / GIB
    return f"{size:.1f} GiB" if size >= 0.1 or count == 0 else f"{size:.2f} GiB"


# Engines --------------------------------------------------------------------------------------------------------------
# Memory of one vLLM on each of its GPUs, or in the machine's memory.
#
# Letters as in the section on parts. References are to vllm 0.32.0.

# A CUDA context, cuBLAS's workspaces and kernels. On an H200 an eager engine of a 4B model took 11 MiB more than all of
# its parts, and a trainer 772 MiB after steps of that model with CUDA 13 (measured). With two GPUs
# vLLM reports up to 1.8 GiB more (vllm PR 10511).
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
ON_CPU = Serving(seqs=64, batched_tokens=256, block_tokens=128)
"""Replies stand still while so many tokens of prompts are read, so they are few."""
CPU_PIECE = 64
"""Tokens of one prompt that are read at a time beside other requests, in `engine_on_cpu`'s order."""
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


def weight_bytes(model: ModelShape, number_bytes: int, gpus: int = 1) -> int:
    """All weights, cut by tensor parallelism; norms, which are not cut, are left out of account."""
    whole = model.parameters * number_bytes if model.stored_bytes is None else model.stored_bytes
    return -(-whole // gpus)


def weight_words(request: Request) -> str:
    """Number of weights and their data type, for people."""
    quantised = "" if request.model.quantised is None else f"{request.model.quantised} and "
    return f"{request.model.parameters:,} in {quantised}{request.dtype}"


def packed_vocabulary(model: ModelShape, number_bytes: int) -> int:
    """Bytes of oneDNN's packed copies of embedding and output matrix on a CPU; vLLM keeps the originals as well, and
    packs twice even if both are one matrix (`layers.vocab_parallel_embedding`).

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


# A layer of PEFT ------------------------------------------------------------------------------------------------------
# Memory of one layer's backward pass if transformers computes the model and PEFT its LoRA.
#
# Letters as in the section on parts. The factors were fitted to torch's own record of every allocation for Llama,
# Mistral and Gemma 3, in eighteen shapes, and are compared with it in `tests/training/test_planned_peft_memory.py`.

_MEASURED = ("LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
"""Architectures that were measured; of Llama and Mistral, models whose documents are not packed."""


def is_packed(model: ModelShape, longest: int) -> bool:
    """True if the trainer packs samples of at most `longest` tokens, by modules of its own: see `packs_documents`."""
    return model.architecture in SUPPORTED and model.packs and not 0 < model.kv.window < longest


def is_measured(model: ModelShape) -> bool:
    """True if the memory of its steps was measured with transformers and PEFT, too."""
    return model.architecture in _MEASURED


def one_peft_layer(model: ModelShape, needs: TrainingNeeds, tokens: int, number_bytes: int) -> int:
    """A layer computed again, with its gradients, at the MLP's backward pass, or attention's if that is more.

    PEFT multiplies with LoRA in float32: in bfloat16 each projection's input is copied, and so is the gradient of its
    output. So the MLP's features take 19 bytes each (24 in float32), and the model's 40 (20). Queries, keys and values
    are kept as they are (4·Q·b and 2·K·b), the head norms' inputs in float32 (Q and K), low-rank products too (10·r).
    """
    b = number_bytes
    of_inner, of_width = (19, 40) if b == 2 else (24, 20)
    head_norms = (model.query + model.key) * 4 if model.head_norm else 0
    in_attention = (5 if model.head_norm else 1) * model.query * b
    kept = of_width * model.width + 4 * model.query * b + 2 * model.key * b + head_norms + 10 * needs.rank
    return tokens * (kept + max(of_inner * model.inner, in_attention)) + _mask(model, tokens, b)


def _mask(model: ModelShape, tokens: int, number_bytes: int) -> int:
    """Layers with a window get a mask of S·S as soon as a document is longer: booleans, and numbers for the kernel."""
    if model.kv.sliding == 0 or tokens <= model.kv.window:
        return 0
    return tokens * tokens * (1 + number_bytes)


# The trainer ----------------------------------------------------------------------------------------------------------
# Peak memory of one rank of the trainer: the backward pass over the largest micro-batch.
#
# Letters: S tokens of a micro-batch, N response positions, L layers, D the model's width, I the MLP's, Q and K
# features of queries and keys, H a head's, V vocabulary, r the adapter's rank, b bytes of a number (2 or 4). The
# counts were read off `clawloop.training.model` and torch's record of every allocation, and were compared with what a
# GPU had in use (benchmarks/results/README.md).

LOGITS_AT_ONCE = 2**26
"""`clawloop.training.model`: more logits than that are computed chunk by chunk, each anew in the backward pass."""

# Tokens, in whole steps of which the trainer is told what it may keep.
_KEPT_STEP = 128
# Buffers of NCCL between GPUs of one machine.
TRAINER_NCCL_BUFFERS = GIB
# Share of a step's temporary memory that torch's allocator holds in pieces too small for the next tensor: 8 %
# on that H200, 9 % with NF4.
CUDA_SLACK = 0.10


def adapter_bytes(model: ModelShape, needs: TrainingNeeds) -> int:
    """float32 LoRA weights, gradient and AdamW's two moments (Kingma & Ba 2015): 16 bytes a parameter."""
    return 16 * model.lora.parameters(needs.rank)


def version_bytes(model: ModelShape, needs: TrainingNeeds) -> int:
    """Bytes on disk: float32 LoRA weights and both moments to resume from (`training.checkpoint`): 12 a parameter."""
    return 12 * model.lora.parameters(needs.rank)


def base_bytes(model: ModelShape, number_bytes: int, positions: int, *, quantised: bool = False) -> int:
    """Frozen weights, and RoPE's table: sine and cosine of H features at each position, float32."""
    small = model.lora.weights if quantised else 0
    whole = (model.text_parameters - small) * number_bytes
    return whole + nf4_bytes(small, number_bytes) + positions * 2 * model.head_dim * 4


def nf4_bytes(weights: int, number_bytes: int) -> int:
    """Half a byte for each weight, a byte for the scale of 64, and b for the scale of 256 scales
    (`clawloop.training.model.decoder`)."""
    return weights // 2 + weights // 64 + weights // (64 * 256) * number_bytes


def unpacked_bytes(model: ModelShape, number_bytes: int) -> int:
    """A projection is computed from an unpacked copy, made anew for each product (torchao's `get_original_weight`).

    Of each weight: its place in NF4's table (int64), what stands there, that scaled, and the copy.
    """
    return model.lora.largest * (8 + 3 * number_bytes)


def layer_inputs(model: ModelShape, tokens: int, number_bytes: int) -> int:
    """L·S·D·b: of each layer its input is kept for the backward pass, the rest is computed again (Chen et al. 2016)."""
    return model.layers * tokens * model.width * number_bytes


def one_layer(model: ModelShape, needs: TrainingNeeds, tokens: int, number_bytes: int, joined: int = 0) -> int:
    """A layer computed again, with its gradients, where that is most: in the MLP's backward pass or attention's.

    In both: the norms' inputs in float32 and outputs, the residual's gradient (D); queries, keys and values repeated
    for all heads and what attention gave (4·Q·b); the head norms' inputs in float32 (Q and K); sine and cosine for
    queries and keys (4·H·b). In the MLP's: gate, its activation, up, their product and two gradients (6·I·b), and the
    low-rank products before down (6·r·b). In attention's: the residual's (D·b), and gradients of queries, keys and
    values and temporaries of the head norms' (6·Q·b). Where samples share a beginning
    (`clawloop.training.model.decoder`), what their branches gave is joined (Q·b); and if that is more than the
    gradients of all, there are those of the queries, and of one branch its sample's keys and values, their gradients,
    and the beginning's as they are summed (8·Q·b for each of the sample's tokens).

    Args:
        joined: tokens of the longest sample that shares its beginning with others; 0 if none does.
    """
    b = number_bytes
    wide = 4 if b == 2 else 0  # what a norm casts to float32 is a copy, unless it was float32
    norms = model.width * (2 * (wide + b) + b + (b if b == 4 else 0))
    attention = _read_in_attention(model, b, joined)
    in_mlp = tokens * (6 * model.inner * b + 6 * needs.rank * b)
    in_attention = tokens * model.width * b + max(6 * tokens, tokens + 8 * joined) * model.query * b
    return tokens * (norms + attention) + max(in_mlp, in_attention)


def kept_layer(model: ModelShape, needs: TrainingNeeds, tokens: int, number_bytes: int, joined: int = 0) -> int:
    """A layer's tensors that its backward pass reads, where they are kept and not computed again.

    The norms' inputs in float32, and outputs (2·D·(4 + b)); of attention what `one_layer` counts; gate, its activation,
    up, and their product (4·I·b); the low-rank products (7·r·b).
    """
    b = number_bytes
    of_inner = 4 * model.inner * b + 7 * needs.rank * b
    return tokens * (2 * model.width * (4 + b) + _read_in_attention(model, b, joined) + of_inner)


def _read_in_attention(model: ModelShape, number_bytes: int, joined: int) -> int:
    """Bytes per token that attention's backward pass reads, see `one_layer`."""
    b = number_bytes
    head_norms = (model.query + model.key) * 4 if model.head_norm else 0
    return 4 * model.query * b + head_norms + 4 * model.head_dim * b + (model.query * b if joined else 0)


def logits(model: ModelShape, needs: TrainingNeeds, positions: int, longest: int | None = None) -> int:
    """The response positions of one chunk: float32 logits, divided by temperature, and their log-softmax: 12 bytes.

    Documents are projected one by one: of those before, log-softmax alone is kept. Comparing distributions, a control
    of them and entropy each keep one more copy, and take one more while they are computed.

    Args:
        positions: N, of all documents of the micro-batch.
        longest: of the document with most; all of them if None.
    """
    at_once = max(1, LOGITS_AT_ONCE // model.vocab)
    in_chunk = min(positions, at_once)
    in_one = min(in_chunk, positions if longest is None else longest)
    extras = int(needs.compares_distributions) + int(needs.controlled) + int(needs.entropy)
    kept, passing = 4 * (1 + extras), 12 if extras else 8
    return model.vocab * (kept * in_chunk + passing * in_one)


def working_bytes(
    model: ModelShape,
    needs: TrainingNeeds,
    number_bytes: int,
    *,
    tokens: int,
    responses: int,
    longest: int | None = None,
    joined: int = 0,
    packed: bool = True,
    recomputed: bool = True,
) -> tuple[int, int]:
    """Activations of the pass with gradient, and what logits take beyond them: they come before any layer's.

    Args:
        tokens: of the micro-batch.
        responses, longest: positions whose logits are computed, see `logits`.
        joined: see `one_layer`.
        packed: see `is_packed`.
        recomputed: of each layer only its input is kept for the backward pass; False, of packed samples: all it reads.
    """
    kept = 0 if recomputed else kept_layer(model, needs, tokens, number_bytes, joined)
    # The last layer is the one with its gradients.
    others = (model.layers - 1) * kept + tokens * model.width * number_bytes
    inputs = layer_inputs(model, tokens, number_bytes) if recomputed else others
    if packed:
        layer = one_layer(model, needs, tokens, number_bytes, joined)
    else:
        layer = one_peft_layer(model, needs, tokens, number_bytes)
    # The last layer's output, its norm's input in float32, and the gradients of both.
    ends = tokens * model.width * (8 + 2 * number_bytes)
    chunk = logits(model, needs, responses, longest) + ends + kept
    return inputs + layer, max(0, chunk - layer)


def reading_hints(model: ModelShape, needs: TrainingNeeds, tokens: int, number_bytes: int) -> int:
    """One layer's intermediates without gradient, where a reply is read with and without hints in one micro-batch.

    Its prompts may be short, so that little of them is shared.
    """
    return (1 + needs.hints) * tokens * number_bytes * (4 * model.width + 3 * model.inner + 3 * model.query)


def kept_tokens(request: Request, spare: int) -> int:
    """Tokens of a micro-batch of which all layers are kept until the backward pass reads them, so that none is computed
    again: as many as fit into what the largest micro-batch takes, and `spare` bytes."""
    limits = request.limits
    if not is_packed(request.model, limits.max_sample_tokens) or request.quantise is not None:
        return 0
    room = sum(_activations(request, limits.micro_batch)) + spare
    steps = range(_KEPT_STEP, limits.micro_batch + 1, _KEPT_STEP)
    return max((n for n in steps if sum(_activations(request, n, recomputed=False)) <= room), default=0)


def _activations(request: Request, tokens: int, *, recomputed: bool = True) -> tuple[int, int]:
    """`working_bytes` of a micro-batch of so many tokens, or what is read without gradient, if that is more."""
    model, needs, b = request.model, request.training, request.number_bytes
    assert needs is not None
    packed, longest = is_packed(model, request.limits.max_sample_tokens), min(request.limits.max_sample_tokens, tokens)
    inner, beyond = working_bytes(
        model, needs, b, tokens=tokens, responses=tokens, joined=longest, packed=packed, recomputed=recomputed
    )
    return max(inner, reading_hints(model, needs, tokens, b)), beyond


def rank_parts(request: Request, ranks: int, *, sharded: bool, kept: int = 0) -> tuple[Part, ...]:
    """Memory of one rank on its GPU, or of the trainer in the machine's memory.

    Args:
        ranks: how many there are.
        sharded: the base model and the adapter are divided among them (FSDP2), not whole in each.
        kept: see `kept_tokens`.
    """
    model, limits, needs, b = request.model, request.limits, request.training, request.number_bytes
    assert needs is not None
    packed = is_packed(model, limits.max_sample_tokens)
    tokens = limits.micro_batch if packed else limits.max_sample_tokens
    quantised = request.quantise is not None
    base = base_bytes(model, b, limits.max_sample_tokens, quantised=quantised)
    adapter = adapter_bytes(model, needs)
    inner, beyond = _activations(request, tokens)
    if kept:
        inner = max(inner, sum(_activations(request, kept, recomputed=False)) - beyond)
    share = ranks if sharded else 1
    stored = f"4 bits and {request.dtype}" if quantised else request.dtype
    divided = f" / {ranks} ranks" if sharded else ""
    parts = [
        Part(PartName.WEIGHTS, -(-base // share), f"{model.text_parameters:,} in {stored}{divided}"),
        Part(
            PartName.ADAPTER,
            -(-adapter // share),
            f"{model.lora.parameters(needs.rank):,} of rank {needs.rank}, 16 bytes each{divided}",
        ),
        Part(
            PartName.ACTIVATIONS,
            inner,
            f"{tokens:,} tokens: a sample of {limits.max_sample_tokens:,}"
            + (" and what shares its beginning" if packed else ", alone")
            + (f"; up to {kept:,} no layer is computed twice" if kept else ""),
        ),
        Part(
            PartName.LOGITS,
            beyond,
            f"{min(tokens, max(1, LOGITS_AT_ONCE // model.vocab)):,} of {model.vocab:,} at once, "
            + ("beyond a layer" if beyond else "in a layer's place"),
        ),
    ]
    unpacked = unpacked_bytes(model, b) if quantised else 0
    if quantised:
        words = f"of a projection of {model.lora.largest:,}, one at a time"
        parts.append(Part(PartName.UNPACKED, unpacked, words))
    if sharded:
        parts.append(Part(PartName.GATHERED, _gathered(model, needs, b), "the vocabulary, and a layer three times"))
    if request.gpus is not None:
        passing = "the three" if quantised else "the two"
        collectives = TRAINER_NCCL_BUFFERS if ranks > 1 else 0
        slack = int(CUDA_SLACK * (inner + beyond + unpacked))
        parts.append(Part(PartName.SLACK, slack, f"{CUDA_SLACK:.0%} of {passing} above"))
        parts.append(
            Part(PartName.RUNTIME, CUDA_RUNTIME + collectives, "CUDA's context" + (", NCCL" if collectives else ""))
        )
    return tuple(parts)


def _gathered(model: ModelShape, needs: TrainingNeeds, number_bytes: int) -> int:
    """FSDP2 keeps the root's tensors whole (vocabulary), and of layers the current, the next, and a copy on its way."""
    vocabulary = model.vocab * model.width * (1 if model.tied else 2)
    layer = (model.text_parameters - vocabulary) * number_bytes + model.lora.parameters(needs.rank) * 4
    return vocabulary * number_bytes + 3 * layer // model.layers
