"""A layout on a machine without GPUs: all processes in one memory."""

from __future__ import annotations

from clawloop.layout import arguments, engine, trainer
from clawloop.layout.engine import Serving
from clawloop.layout.parts import MIB, Device, Layout, Part, PartName, Process, Role
from clawloop.layout.request import Request
from clawloop.layout.shortage import Shortage

# Measured on a 2-core machine: proportional set size with a model of a megabyte.
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
"""Share of the machine's memory that is left to its system."""
FEWEST_CONTEXTS = 2
"""Whole contexts that the cache holds, so that one long conversation does not put out every other."""
CACHE_SHARE = 1 / 16
"""Share of the machine's memory for more contexts; without them vLLM recomputes concurrent replies again and again."""


def on_cpu(request: Request) -> Layout | Shortage:
    """One engine, one trainer, and the services beside them.

    Caches are as large as all requests at once can use, if `CACHE_SHARE` allows, else smaller; of `FEWEST_CONTEXTS`
    where memory is short.
    """
    device = Device("memory", request.memory, int(request.memory * KEPT_FREE))
    processes = _processes(request, int(request.memory * CACHE_SHARE))
    if sum(process.bytes for process in processes) > device.usable:
        processes = _processes(request, 0)
    if sum(process.bytes for process in processes) > device.usable:
        return Shortage(device, processes)
    return Layout("cpu", (device,), processes, None, request.limits.max_model_len, ())


def _processes(request: Request, cache: int) -> tuple[Process, ...]:
    """
    Args:
        cache: bytes of each engine's, if they hold `FEWEST_CONTEXTS`.
    """
    engines = [_engine(request.for_engines, Role.ENGINE, cache)]
    if request.judge_model is not None:
        engines.append(_engine(request.for_judge, Role.JUDGE, cache))
    learners = () if request.training is None else (_trainer(request),)
    return (*engines, *learners, *(_service(name, size) for name, size in SERVICES.items()))


def _contexts(request: Request, serving: Serving, cache: int) -> int:
    """Whole contexts in a cache of so many bytes: no more than requests at once, no fewer than `FEWEST_CONTEXTS`."""
    held = engine.kv_tokens(request, cache, serving) // request.limits.max_model_len
    return max(FEWEST_CONTEXTS, min(serving.seqs, held))


def _engine(request: Request, role: Role, cache_bytes: int) -> Process:
    serving = engine.on_cpu(request.limits.max_model_len)
    model, limits, b = request.model, request.limits, request.number_bytes
    weights = engine.weight_bytes(model, b) + engine.packed_vocabulary(model, b)
    rank = limits.max_lora_rank if request.training is None else request.training.rank
    slots = engine.lora_slots(model, limits.max_loras, limits.max_lora_rank, b)
    loaded = engine.loaded_loras(model, limits.max_cpu_loras, rank, b)
    contexts = _contexts(request, serving, cache_bytes)
    tokens = contexts * limits.max_model_len
    cache = engine.kv_bytes(request, tokens, serving)
    with_lora = role is Role.ENGINE
    lora = Part(PartName.LORA, slots + loaded, f"{limits.max_loras} of rank {limits.max_lora_rank}, and those loaded")
    parts = (
        Part(PartName.WEIGHTS, weights, f"{engine.weight_words(request)}, the vocabulary packed twice more"),
        *((lora,) if with_lora else ()),
        Part(PartName.KV, cache, f"{tokens:,} tokens, {contexts} contexts"),
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
