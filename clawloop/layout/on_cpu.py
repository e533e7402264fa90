"""A layout on a machine without GPUs: all processes in one memory."""

from __future__ import annotations

from clawloop.layout import arguments, engine, trainer
from clawloop.layout.engine import Serving
from clawloop.layout.parts import MIB, Device, Layout, Part, PartName, Process, Role
from clawloop.layout.request import Request
from clawloop.layout.shortage import Shortage

# Measured by `benchmarks.plan_memory` on a 2-core machine: proportional set size with a model of a megabyte.
ENGINE_RUNTIME = 1450 * MIB
TRAINER_RUNTIME = 600 * MIB
SERVICES = {
    "gateway": 115 * MIB,
    "orchestrator": 115 * MIB,
    "judge worker": 115 * MIB,
    "engine agent": 115 * MIB,
    "PostgreSQL": 100 * MIB,
    "Temporal": 170 * MIB,
    "clawloop up": 150 * MIB,
}
KEPT_FREE = 0.05
"""Of the machine's memory, for its system."""
CONTEXTS = 2
"""Whole contexts that the cache holds, so that one long conversation does not put out every other."""


def on_cpu(request: Request) -> Layout | Shortage:
    """One engine, one trainer, and the services beside them."""
    serving = engine.on_cpu(request.limits.max_model_len)
    device = Device("memory", request.memory, int(request.memory * KEPT_FREE))
    engines = [_engine(request.for_engines, serving, Role.ENGINE)]
    if request.judge_model is not None:
        for_judge = request.for_judge
        engines.append(_engine(for_judge, engine.on_cpu(for_judge.limits.max_model_len), Role.JUDGE))
    learners = () if request.training is None else (_trainer(request),)
    processes = (*engines, *learners, *(_service(name, size) for name, size in SERVICES.items()))
    if sum(process.bytes for process in processes) > device.usable:
        return Shortage(device, processes)
    return Layout("cpu", (device,), processes, None, request.limits.max_model_len, ())


def _engine(request: Request, serving: Serving, role: Role) -> Process:
    model, limits, b = request.model, request.limits, request.number_bytes
    weights = engine.weight_bytes(model, b) + engine.packed_vocabulary(model, b)
    rank = limits.max_lora_rank if request.training is None else request.training.rank
    slots = engine.lora_slots(model, limits.max_loras, limits.max_lora_rank, b)
    loaded = engine.loaded_loras(model, limits.max_cpu_loras, rank, b)
    tokens = CONTEXTS * limits.max_model_len
    cache = engine.kv_bytes(request, tokens, serving)
    with_lora = role is Role.ENGINE
    lora = Part(PartName.LORA, slots + loaded, f"{limits.max_loras} of rank {limits.max_lora_rank}, and those loaded")
    parts = (
        Part(PartName.WEIGHTS, weights, f"{engine.weight_words(request)}, the vocabulary packed twice more"),
        *((lora,) if with_lora else ()),
        Part(PartName.KV, cache, f"{tokens:,} tokens, {CONTEXTS} contexts"),
        Part(
            PartName.READING,
            engine.reading_bytes(model, serving, b),
            f"a prompt of {serving.batched_tokens:,} tokens, or {serving.seqs} requests' logits",
        ),
        Part(PartName.RUNTIME, ENGINE_RUNTIME, "three processes that import vLLM"),
    )
    words = arguments.engine_arguments(request, serving, gpus=0, with_lora=with_lora)
    # Chunked prefill together with a request's `seed` ends the CPU engine ("CPU Generator does not use offset").
    words = (*words, "--no-enable-chunked-prefill", *arguments.cache_of(cache))
    cached = engine.kv_tokens(request, cache, serving)
    serves = "serves policies" + ("" if request.judge_model else " and judges")
    name, why = ("engine 0", serves) if with_lora else (str(role), "answers judges, with a model of its own")
    return Process(name, role, (), parts, why, words, arguments.engine_environment(()), cached)


def _trainer(request: Request) -> Process:
    parts = (
        *trainer.rank_parts(request, 1, sharded=False),
        Part(PartName.RUNTIME, TRAINER_RUNTIME, "torch, and its threads' scratch"),
    )
    words = arguments.trainer_arguments(request, 0)
    why = "holds the base model a second time"
    return Process("trainer", Role.TRAINER, (), parts, why, words, arguments.trainer_environment(()))


def _service(name: str, size: int) -> Process:
    return Process(name, Role.SERVICE, (), (Part(PartName.RUNTIME, size, "measured"),), "holds no model")
