"""Peak memory of one rank of the trainer: the backward pass over the largest micro-batch.

Letters: S tokens of a micro-batch, N response positions, L layers, D the model's width, I the MLP's, Q and K features
of queries and keys, H a head's, V vocabulary, r the adapter's rank, b bytes of a number (2 or 4). The counts were
read off `clawloop.training.model` and torch's record of every allocation, and were compared with what a GPU had in use
(benchmarks/results/README.md).
"""

from __future__ import annotations

from clawloop.layout.model_shape import ModelShape
from clawloop.layout.parts import GIB, MIB, Part, PartName
from clawloop.layout.peft_layer import is_by_peft, one_peft_layer
from clawloop.layout.request import Request, TrainingNeeds

LOGITS_AT_ONCE = 2**26
"""`clawloop.training.model`: more logits than that are computed chunk by chunk, each anew in the backward pass."""

# Context, cuBLAS's workspaces and kernels: 772 MiB after steps of a 4B model on an H200 with CUDA 13.
CUDA_RUNTIME = 768 * MIB
# Buffers of NCCL between GPUs of one machine.
NCCL_BUFFERS = GIB
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
    (`clawloop.training.model.nf4`)."""
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
    values and temporaries of the head norms' (6·Q·b). Where samples share a beginning (`clawloop.training.attention`),
    what their branches gave is joined (Q·b); and if that is more than the gradients of all, there are those of the
    queries, and of one branch its sample's keys and values, their gradients, and the beginning's as they are summed
    (8·Q·b for each of the sample's tokens).

    Args:
        joined: tokens of the longest sample that shares its beginning with others; 0 if none does.
    """
    b = number_bytes
    wide = 4 if b == 2 else 0  # what a norm casts to float32 is a copy, unless it was float32
    norms = model.width * (2 * (wide + b) + b + (b if b == 4 else 0))
    head_norms = (model.query + model.key) * 4 if model.head_norm else 0
    attention = 4 * model.query * b + head_norms + 4 * model.head_dim * b + (model.query * b if joined else 0)
    in_mlp = tokens * (6 * model.inner * b + 6 * needs.rank * b)
    in_attention = tokens * model.width * b + max(6 * tokens, tokens + 8 * joined) * model.query * b
    return tokens * (norms + attention) + max(in_mlp, in_attention)


def logits(model: ModelShape, needs: TrainingNeeds, positions: int, longest: int | None = None) -> int:
    """The response positions of one chunk: float32 logits, divided by temperature, and their log-softmax: 12 bytes.

    Documents are projected one by one: of those before, log-softmax alone is kept. Comparing distributions and
    entropy each keep one more copy, and take one more while they are computed.

    Args:
        positions: N, of all documents of the micro-batch.
        longest: of the document with most; all of them if None.
    """
    at_once = max(1, LOGITS_AT_ONCE // model.vocab)
    in_chunk = min(positions, at_once)
    in_one = min(in_chunk, positions if longest is None else longest)
    extras = int(needs.compares_distributions) + int(needs.entropy)
    kept, passing = 4 * (1 + extras), 12 if extras else 8
    return model.vocab * (kept * in_chunk + passing * in_one)


def passes_before(model: ModelShape, needs: TrainingNeeds, tokens: int, number_bytes: int) -> int:
    """Teacher, reference and policy without gradient: one layer's intermediates, or the logits of one document.

    The base model as reference is the same weights with the adapter off, so nothing is held a second time.
    """
    one = tokens * number_bytes * (4 * model.width + 3 * model.inner + 3 * model.query)
    return max(one, logits(model, needs, tokens))


def working_bytes(
    model: ModelShape,
    needs: TrainingNeeds,
    number_bytes: int,
    *,
    tokens: int,
    responses: int,
    longest: int | None = None,
    joined: int = 0,
) -> tuple[int, int]:
    """Activations of the pass with gradient, and what logits take beyond them: they come before any layer's.

    Args:
        tokens: of the micro-batch.
        responses, longest: positions whose logits are computed, see `logits`.
        joined: see `one_layer`.
    """
    inputs = layer_inputs(model, tokens, number_bytes)
    if is_by_peft(model):
        layer = one_peft_layer(model, needs, tokens, number_bytes)
    else:
        layer = one_layer(model, needs, tokens, number_bytes, joined)
    # The last layer's output, its norm's input in float32, and the gradients of both.
    ends = tokens * model.width * (8 + 2 * number_bytes)
    chunk = logits(model, needs, responses, longest) + ends
    return inputs + layer, max(0, chunk - layer)


def rank_parts(request: Request, ranks: int, *, sharded: bool) -> tuple[Part, ...]:
    """Memory of one rank on its GPU, or of the trainer in the machine's memory.

    Args:
        ranks: how many there are.
        sharded: the base model and the adapter are divided among them (FSDP2), not whole in each.
    """
    model, limits, needs, b = request.model, request.limits, request.training, request.number_bytes
    assert needs is not None
    # transformers reads each document alone.
    tokens = limits.max_sample_tokens if is_by_peft(model) else limits.micro_batch
    quantised = request.quantise is not None
    base = base_bytes(model, b, limits.max_sample_tokens, quantised=quantised)
    adapter = adapter_bytes(model, needs)
    inner, beyond = working_bytes(model, needs, b, tokens=tokens, responses=tokens, joined=limits.max_sample_tokens)
    share = ranks if sharded else 1
    kept = f"4 bits and {request.dtype}" if quantised else request.dtype
    divided = f" / {ranks} ranks" if sharded else ""
    parts = [
        Part(PartName.WEIGHTS, -(-base // share), f"{model.text_parameters:,} in {kept}{divided}"),
        Part(
            PartName.ADAPTER,
            -(-adapter // share),
            f"{model.lora.parameters(needs.rank):,} of rank {needs.rank}, 16 bytes each{divided}",
        ),
        Part(
            PartName.ACTIVATIONS,
            inner,
            f"{tokens:,} tokens: a sample of {limits.max_sample_tokens:,}"
            + ("" if is_by_peft(model) else " and what shares its beginning"),
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
        collectives = NCCL_BUFFERS if ranks > 1 else 0
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
