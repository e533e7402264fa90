"""Shapes of models for tests: a small one for sums by hand, and some that people run."""

from __future__ import annotations

from clawloop.app.layout.model_folder import KvShape, LoraShape, ModelShape
from clawloop.app.layout.request import Gpus, Limits, Request, TrainingNeeds
from clawloop.training.options import Dtype

GIB = 2**30


def decoder(
    *,
    name: str = "small",
    vocab: int,
    width: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    tied: bool = True,
    context_tokens: int = 40960,
    experts: int = 0,
    architecture: str = "Qwen3ForCausalLM",
) -> ModelShape:
    """A decoder like Qwen3's; norms are left out of its parameters."""
    query, key = heads * head_dim, kv_heads * head_dim
    layer = width * (2 * query + 2 * key) + 3 * width * inner * max(1, experts)
    parameters = layers * layer + vocab * width * (1 if tied else 2)
    adapted_inner = 0 if experts else inner
    return ModelShape(
        name=name,
        architecture=architecture,
        context_tokens=context_tokens,
        dtype="bfloat16",
        parameters=parameters,
        text_parameters=parameters,
        vocab=vocab,
        width=width,
        layers=layers,
        inner=inner,
        query=query,
        key=key,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=tied,
        head_norm=True,
        lora=LoraShape(
            column_in=layers * (3 * width + (2 * width if adapted_inner else 0)),
            column_out=layers * (query + 2 * key + 2 * adapted_inner),
            row_in=layers * (query + adapted_inner),
            row_out=layers * (width + (width if adapted_inner else 0)),
            weights=layers * (width * (2 * query + 2 * key) + 3 * width * adapted_inner),
            largest=width * max(query, adapted_inner),
        ),
        kv=KvShape(full=layers * 2 * key),
        experts=experts,
    )


SMALL = decoder(vocab=1000, width=8, inner=16, layers=2, heads=4, kv_heads=2, head_dim=4)
QWEN3_4B = decoder(name="Qwen3-4B", vocab=151936, width=2560, inner=9728, layers=36, heads=32, kv_heads=8, head_dim=128)
LLAMA_70B = decoder(
    name="Llama-70B",
    vocab=128256,
    width=8192,
    inner=28672,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    tied=False,
    architecture="LlamaForCausalLM",
)


def request(
    model: ModelShape,
    gpus: tuple[float, ...] | None,
    *,
    limits: Limits | None = None,
    serve: tuple[int, ...] | None = None,
    judge: tuple[int, ...] | None = None,
    train: tuple[int, ...] | None = None,
    training: TrainingNeeds | None = TrainingNeeds(),  # noqa: B008  # immutable
    dtype: Dtype = "bfloat16",
    memory: float = 64,
    judge_model: ModelShape | None = None,
) -> Request:
    """A request; `gpus` and `memory` in GiB."""
    sizes = None if gpus is None else tuple(int(size * GIB) for size in gpus)
    return Request(
        model=model,
        limits=limits or Limits(max_model_len=32768, max_sample_tokens=32768),
        gpus=None if sizes is None else Gpus(sizes=sizes, serve=serve, judge=judge, train=train),
        memory=int(memory * GIB),
        training=training,
        dtype=dtype,
        judge_model=judge_model,
    )
