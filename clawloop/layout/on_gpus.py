"""A layout on GPUs: one shared by engine and trainer, or engines, judge engine and trainer on GPUs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from clawloop.errors import SetupError
from clawloop.layout import arguments, engine, trainer
from clawloop.layout.engine import LARGE_FROM, LARGE_GPU, SMALL_GPU, UTILIZATION, Serving
from clawloop.layout.gpu_sets import check_sets, splits
from clawloop.layout.parts import Device, Layout, Process, Ranks, Role
from clawloop.layout.request import Gpus, Request
from clawloop.layout.shortage import Shortage

KEPT_FREE = 0.05
"""Share of a trainer's GPU that is left to the driver, and to memory that the estimates miss."""
MOST_PARALLEL = 8
"""GPUs of one engine: as many as one machine connects."""


def on_gpus(request: Request) -> Layout | Shortage:
    """The layout on the request's GPUs, or the shortage if no split of the GPUs fits.

    Raises:
        SetupError: the sets of GPUs overlap, name one that is not there, or leave none.
    """
    gpus = request.gpus
    assert gpus is not None
    check_sets(gpus, training=request.training is not None)
    if request.judge_model is not None and not gpus.judge:
        raise SetupError("--judge-model: the judge engine needs GPUs of its own: --judge-gpus")
    if request.training is not None and len(gpus.sizes) == 1:
        return _shared(request, gpus.sizes[0])
    found = [_apart(request, split) for split in splits(gpus, training=request.training is not None)]
    return next((layout for layout in found if isinstance(layout, Layout)), found[0])


def _shared(request: Request, size: int) -> Layout | Shortage:
    device = _device(0, size, 1 - KEPT_FREE)
    learner = _learner(request, (0,), "on the engine's GPU: it is the only one")
    beside = engine.parts_beside_cache(request.for_engines, SMALL_GPU, 1)
    rest = device.usable - learner.bytes - sum(part.bytes for part in beside)
    # No more than all requests can fill.
    most = engine.kv_bytes(request, SMALL_GPU.seqs * request.limits.max_model_len, SMALL_GPU)
    cache = max(min(rest, most), engine.kv_bytes(request, request.limits.max_model_len, SMALL_GPU))
    served = Process(
        "engine 0",
        Role.ENGINE,
        (0,),
        (*beside, engine.cache_part(request, cache, SMALL_GPU)),
        "beside the trainer: it starts first, and can start again while the trainer holds its memory",
        environment=arguments.engine_environment((0,)),
        cached_tokens=engine.kv_tokens(request, cache, SMALL_GPU),
    )
    words = arguments.engine_arguments(request, SMALL_GPU, gpus=1, with_lora=True)
    served = replace(served, arguments=(*words, *arguments.cache_on_shared_gpu(cache, served.bytes, device)))
    if cache > rest:
        return Shortage(device, (served, learner))
    return Layout("cuda", (device,), (served, learner), None, request.limits.max_model_len, ())


def _apart(request: Request, gpus: Gpus) -> Layout | Shortage:
    """The layout if all sets of GPUs are given."""
    processes: list[Process] = []
    for role, indices in ((Role.ENGINE, gpus.serve or ()), (Role.JUDGE, gpus.judge or ())):
        found = _engines(request, gpus, role, indices) if indices else []
        if isinstance(found, Shortage):
            return found
        processes += found
    ranks: Ranks | None = None
    if request.training is not None:
        learner = _trainer(request, gpus)
        if isinstance(learner, Shortage):
            return learner
        process, ranks = learner
        processes.append(process)
    devices = tuple(
        _device(index, size, 1 - KEPT_FREE if index in (gpus.train or ()) else UTILIZATION)
        for index, size in enumerate(gpus.sizes)
    )
    context = request.limits.max_model_len
    return Layout("cuda", devices, tuple(processes), ranks, context, tuple(_idle(gpus, processes)))


def _idle(gpus: Gpus, processes: list[Process]) -> Iterator[str]:
    held = {index for process in processes for index in process.gpus}
    named = {index for indices in (gpus.serve, gpus.judge, gpus.train) for index in indices or ()}
    for index in range(len(gpus.sizes)):
        if index not in named:
            yield f"GPU {index} is in no set, and left alone"
        elif index not in held:
            yield f"GPU {index} is idle: the engines of its set take whole groups of GPUs"


def _engines(request: Request, gpus: Gpus, role: Role, indices: tuple[int, ...]) -> list[Process] | Shortage:
    """As many engines as the set has room for, each on as few GPUs as hold the model; a judge is one, on all GPUs.

    If no engine fits, the shortage is that of the engine on most GPUs.
    """
    request = request.for_judge if role is Role.JUDGE else request.for_engines
    sizes = [2**n for n in range(len(indices).bit_length()) if 2**n <= min(len(indices), MOST_PARALLEL)]
    possible = [size for size in sizes if request.model.takes_tensor_parallel(size)]
    lacking: dict[int, Shortage] = {}
    for size in reversed(possible) if role is Role.JUDGE else possible:
        groups = [indices[first : first + size] for first in range(0, len(indices) - size + 1, size)]
        made = [_engine(request, gpus, role, number, group) for number, group in enumerate(groups)]
        made = made[:1] if role is Role.JUDGE else made
        short = [found for found in made if isinstance(found, Shortage)]
        if not short:
            return [found for found in made if isinstance(found, Process)]
        lacking[size] = short[0]
    return lacking[max(lacking)]  # one GPU is always a possible size


def _engine(request: Request, gpus: Gpus, role: Role, number: int, group: tuple[int, ...]) -> Process | Shortage:
    """An engine with the limits of large GPUs if its GPUs are large and the memory suffices, else of small GPUs."""
    smallest = min(group, key=lambda index: gpus.sizes[index])
    device = _device(smallest, gpus.sizes[smallest], UTILIZATION)
    large, small = (_engine_with(request, gpus, role, number, group, way, device) for way in (LARGE_GPU, SMALL_GPU))
    if device.bytes >= LARGE_FROM and large.bytes <= device.usable:
        return large
    return small if small.bytes <= device.usable else Shortage(device, (small,))


def _engine_with(
    request: Request, gpus: Gpus, role: Role, number: int, group: tuple[int, ...], serving: Serving, device: Device
) -> Process:
    """One engine; its memory may exceed the device's."""
    count, with_lora = len(group), role is Role.ENGINE
    beside = engine.parts_beside_cache(request, serving, count, with_lora=with_lora)
    rest = device.usable - sum(part.bytes for part in beside)
    cache = max(rest, engine.kv_bytes(request, request.limits.max_model_len, serving, count))
    serves = "serves policies" + ("" if gpus.judge else " and judges")
    judges = "answers judges by base weights, so that policies' requests do not wait for votes"
    return Process(
        f"{role} {number}" if with_lora else str(role),
        role,
        group,
        (*beside, engine.cache_part(request, cache, serving, count)),
        (serves if with_lora else judges) + (f", cut over {count} GPUs" if count > 1 else ""),
        (
            *arguments.engine_arguments(request, serving, gpus=count, with_lora=with_lora),
            *arguments.cache_on_own_gpus(),
        ),
        arguments.engine_environment(group),
        engine.kv_tokens(request, cache, serving, count),
    )


def _trainer(request: Request, gpus: Gpus) -> tuple[Process, Ranks | None] | Shortage:
    indices = gpus.train or ()
    smallest = min(indices, key=lambda index: gpus.sizes[index])
    device = _device(smallest, gpus.sizes[smallest], 1 - KEPT_FREE)
    if len(indices) == 1:
        alone = _learner(request, indices, "on a GPU of its own: engines answer as fast while it trains")
        return (alone, None) if alone.bytes <= device.usable else Shortage(device, (alone,))
    why = "data-parallel: each rank holds the base model and reads its part of the samples"
    whole = _learner(request, indices, why)
    if whole.bytes <= device.usable:
        return whole, _ranks(indices, sharded=False)
    if request.quantise is not None:
        return Shortage(device, (whole,))  # FSDP does not divide 4-bit weights here
    why = "FSDP2: the base model does not fit one GPU beside the activations, so the ranks divide it"
    divided = _learner(request, indices, why, sharded=True)
    fits = divided.bytes <= device.usable
    return (divided, _ranks(indices, sharded=True)) if fits else Shortage(device, (divided,))


def _learner(request: Request, indices: tuple[int, ...], why: str, *, sharded: bool = False) -> Process:
    return Process(
        "trainer",
        Role.TRAINER,
        indices,
        trainer.rank_parts(request, len(indices), sharded=sharded),
        why,
        arguments.trainer_arguments(request, len(indices), _ranks(indices, sharded=sharded)),
        arguments.trainer_environment(indices),
    )


def _ranks(indices: tuple[int, ...], *, sharded: bool) -> Ranks | None:
    if len(indices) == 1:
        return None
    return "sharded" if sharded else "replicated"


def _device(index: int, size: int, share: float) -> Device:
    return Device(f"GPU {index}", size, size - int(size * share))
