"""The layout for a request, on GPUs or in one memory, or what is missing and which settings would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from clawloop.app.layout import memory as memory_module
from clawloop.app.layout import table
from clawloop.app.layout.memory import (
    GIB,
    LARGE_FROM,
    LARGE_GPU,
    MIB,
    SMALL_GPU,
    UTILIZATION,
    Device,
    Layout,
    Part,
    PartName,
    Process,
    Role,
    Serving,
    gibibytes,
    is_measured,
    is_packed,
    version_bytes,
)
from clawloop.app.layout.model_folder import require_trainable_weights
from clawloop.app.layout.request import ENGINE_RANKS, FEWEST_LORAS, Gpus, Limits, Request
from clawloop.core.errors import SetupError
from clawloop.core.recipes.recipe import DEFAULT_RECIPE
from clawloop.training.options import RankWeights

# Shortage -------------------------------------------------------------------------------------------------------------
# A lack of memory, told in one sentence with numbers.


@dataclass(frozen=True, slots=True)
class Shortage:
    """Processes that need more memory than a device has.

    Args:
        device: the smallest one that they would have to share.
        processes: with the least memory they can do with.
    """

    device: Device
    processes: tuple[Process, ...]

    @property
    def needed(self) -> int:
        return sum(process.bytes for process in self.processes)

    @property
    def largest(self) -> tuple[Process, Part]:
        parts = [(process, part) for process in self.processes for part in process.parts]
        return max(parts, key=lambda found: found[1].bytes)

    def __str__(self) -> str:
        process, part = self.largest
        who = " and ".join(process.name for process in self.processes)
        verb = "needs" if len(self.processes) == 1 else "need"
        return (
            f"{self.device.name} has {gibibytes(self.device.usable)} to use, {who} {verb} {gibibytes(self.needed)}; "
            f"the largest part is the {process.name}'s {part.name}, {gibibytes(part.bytes)} ({part.how})"
        )


# GPUs -----------------------------------------------------------------------------------------------------------------
# The GPUs that serve, judge and train: as options name them, or chosen.


def splits(gpus: Gpus, *, training: bool) -> Iterator[Gpus]:
    """The sets as given, and where they are not, all ways to part the rest: half and half first, the first GPUs serve.

    Of GPUs that differ in size the first may be the ones that a trainer needs.
    """
    judges = gpus.judge or ()
    if not training:
        rest = tuple(index for index in range(len(gpus.sizes)) if index not in judges)
        yield replace(gpus, serve=gpus.serve or rest, train=())
        return
    if gpus.serve is not None and gpus.train is not None:
        yield gpus
        return
    taken = {*judges, *(gpus.serve or ()), *(gpus.train or ())}
    rest = tuple(index for index in range(len(gpus.sizes)) if index not in taken)
    if gpus.serve is not None or gpus.train is not None:
        yield replace(gpus, serve=gpus.serve or rest, train=gpus.train or rest)
        return
    half = len(rest) // 2
    counts = sorted(range(1, len(rest)), key=lambda count: (abs(count - half), count))
    for training_gpus in counts:
        yield replace(gpus, serve=rest[:-training_gpus], train=rest[-training_gpus:])
    if len({gpus.sizes[index] for index in rest}) > 1:
        for training_gpus in counts:
            yield replace(gpus, serve=rest[training_gpus:], train=rest[:training_gpus])


def check_sets(gpus: Gpus, *, training: bool) -> None:
    """
    Raises:
        SetupError: the sets overlap, name a GPU that is not there, or leave none.
    """
    sets = {"--serve-gpus": gpus.serve, "--judge-gpus": gpus.judge, "--train-gpus": gpus.train}
    owners: dict[int, str] = {}
    for option, indices in sets.items():
        for index in indices or ():
            if index >= len(gpus.sizes):
                raise SetupError(f"{option}: there is no GPU {index}, --gpus lists {len(gpus.sizes)}, from 0")
            if index in owners:
                shared = " (engine and trainer share a GPU only where it is the only one)"
                raise SetupError(f"GPU {index} is in {owners[index]} and {option}: put it in one of them{shared}")
            owners[index] = option
    if gpus.train and not training:
        raise SetupError("--train-gpus and --no-train contradict each other: leave one out")
    if len(gpus.sizes) == 1 and training and owners:
        raise SetupError(f"{owners[0]}: with one GPU engine and trainer share it: leave the sets out")
    free = len(gpus.sizes) - len(owners)
    wanting = ([] if gpus.serve else ["engines"]) + ([] if gpus.train or not training else ["the trainer"])
    if len(gpus.sizes) > 1 and free < len(wanting):
        raise SetupError(f"no GPU is left for {' and '.join(wanting)}: give fewer to {', '.join(set(owners.values()))}")


# Without GPUs ---------------------------------------------------------------------------------------------------------
# A layout on a machine without GPUs: all processes in one memory.

# Measured on a 2-core machine: proportional set size with a model of a megabyte (docs/results.md, Weight).
ENGINE_RUNTIME = 1050 * MIB
TRAINER_RUNTIME = 600 * MIB
SERVICES = {
    "gateways": (280 * MIB, "two, measured"),
    "combined worker": (130 * MIB, "orchestrator, judge and engine agent, measured"),
    "environment worker": (120 * MIB, "measured"),
    "PostgreSQL": (100 * MIB, "measured, and room for more connections"),
    "Temporal": (180 * MIB, "measured"),
    "clawloop up": (180 * MIB, "with a guard for each part, measured"),
}
"""Memory of each process that `clawloop up` starts beside one engine and one trainer, and its source."""
KEPT_FREE = 0.05
"""Share of the machine's memory that is left to its system."""
FEWEST_CONTEXTS = 2
"""Whole contexts that the cache holds, so that one long conversation does not put out every other."""
CACHE_SHARE = 1 / 16
"""Share of the machine's memory for more contexts; without them vLLM recomputes concurrent replies again and again."""

LAYERS_SHARE = 1 / 16
"""Share of the machine's memory, as far as it is left, for layers that the trainer need not compute again."""


def on_cpu(request: Request) -> Layout | Shortage:
    """One engine, one trainer, and the services beside them.

    Caches are as large as all requests at once can use, if `CACHE_SHARE` allows, else smaller; of `FEWEST_CONTEXTS`
    where memory is short.
    """
    device = Device("memory", request.memory, int(request.memory * KEPT_FREE))
    processes: tuple[Process, ...] = ()
    for cache in (int(request.memory * CACHE_SHARE), 0):
        processes = _processes(request, cache)
        left = device.usable - sum(process.bytes for process in processes)
        if left >= 0:
            processes = _processes(request, cache, min(left, int(request.memory * LAYERS_SHARE)))
            return Layout("cpu", (device,), processes, None, request.limits.max_model_len, ())
    return Shortage(device, processes)


def _processes(request: Request, cache: int, spare: int = 0) -> tuple[Process, ...]:
    """
    Args:
        cache: bytes of each engine's, if they hold `FEWEST_CONTEXTS`.
        spare: bytes for layers that the trainer need not compute again.
    """
    engines = [_engine_on_cpu(request.for_engines, Role.ENGINE, cache)]
    if request.judge_model is not None:
        engines.append(_engine_on_cpu(request.for_judge, Role.JUDGE, cache))
    learners = () if request.training is None else (_trainer_on_cpu(request, spare),)
    return (*engines, *learners, *(_service(name, size, how) for name, (size, how) in SERVICES.items()))


def _contexts(request: Request, serving: Serving, cache: int) -> int:
    """Whole contexts in a cache of so many bytes: no more than requests at once, no fewer than `FEWEST_CONTEXTS`."""
    held = memory_module.kv_tokens(request, cache, serving) // request.limits.max_model_len
    return max(FEWEST_CONTEXTS, min(serving.seqs, held))


def _engine_on_cpu(request: Request, role: Role, cache_bytes: int) -> Process:
    serving = memory_module.ON_CPU
    model, limits, b = request.model, request.limits, request.number_bytes
    weights = memory_module.weight_bytes(model, b) + memory_module.packed_vocabulary(model, b)
    rank = limits.max_lora_rank if request.training is None else request.training.rank
    slots = memory_module.lora_slots(model, limits.max_loras, limits.max_lora_rank, b)
    loaded = memory_module.loaded_loras(model, limits.max_cpu_loras, rank, b)
    contexts = _contexts(request, serving, cache_bytes)
    tokens = contexts * limits.max_model_len
    cache = memory_module.kv_bytes(request, tokens, serving)
    with_lora = role is Role.ENGINE
    lora = Part(PartName.LORA, slots + loaded, f"{limits.max_loras} of rank {limits.max_lora_rank}, and those loaded")
    parts = (
        Part(PartName.WEIGHTS, weights, f"{memory_module.weight_words(request)}, the vocabulary packed twice more"),
        *((lora,) if with_lora else ()),
        Part(PartName.KV, cache, f"{tokens:,} tokens, {contexts} contexts"),
        Part(
            PartName.READING,
            memory_module.reading_bytes(model, serving, b),
            f"a prompt of {serving.batched_tokens:,} tokens, or {serving.seqs} requests' logits",
        ),
        Part(PartName.RUNTIME, ENGINE_RUNTIME, "three processes that share what they import"),
    )
    words = table.engine_arguments(request, serving, gpus=0, with_lora=with_lora)
    words = (*words, *table.cpu_arguments(cache))
    cached = memory_module.kv_tokens(request, cache, serving)
    serves = "serves policies" + ("" if request.judge_model else " and judges")
    name, why = ("engine 0", serves) if with_lora else (str(role), "answers judges, with a model of its own")
    return Process(name, role, (), parts, why, words, table.engine_environment(()), cached)


def _trainer_on_cpu(request: Request, spare: int) -> Process:
    kept = memory_module.kept_tokens(request, spare)
    parts = (
        *memory_module.rank_parts(request, 1, sharded=False, kept=kept),
        Part(PartName.RUNTIME, TRAINER_RUNTIME, "torch, and its threads' scratch"),
    )
    words = table.trainer_arguments(request, 0, kept=kept)
    why = "holds the base model a second time"
    return Process("trainer", Role.TRAINER, (), parts, why, words, table.trainer_environment(()))


def _service(name: str, size: int, how: str) -> Process:
    return Process(name, Role.SERVICE, (), (Part(PartName.RUNTIME, size, how),), "holds no model")


# On GPUs --------------------------------------------------------------------------------------------------------------
# A layout on GPUs: one shared by engine and trainer, or engines, judge engine and trainer on GPUs of their own.

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
    beside = memory_module.parts_beside_cache(request.for_engines, SMALL_GPU, 1)
    rest = device.usable - learner.bytes - sum(part.bytes for part in beside)
    # No more than all requests can fill.
    most = memory_module.kv_bytes(request, SMALL_GPU.seqs * request.limits.max_model_len, SMALL_GPU)
    cache = max(min(rest, most), memory_module.kv_bytes(request, request.limits.max_model_len, SMALL_GPU))
    served = Process(
        "engine 0",
        Role.ENGINE,
        (0,),
        (*beside, memory_module.cache_part(request, cache, SMALL_GPU)),
        "beside the trainer: it starts first, and can start again while the trainer holds its memory",
        environment=table.engine_environment((0,)),
        cached_tokens=memory_module.kv_tokens(request, cache, SMALL_GPU),
    )
    words = table.engine_arguments(request, SMALL_GPU, gpus=1, with_lora=True)
    served = replace(served, arguments=(*words, *table.cache_on_shared_gpu(cache, served.bytes, device)))
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
    ranks: RankWeights | None = None
    if request.training is not None:
        learner = _trainer_on_gpus(request, gpus)
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
    """The most engines that the set has room for, each on the fewest GPUs that hold the model; one judge, on all GPUs.

    If no engine fits, the shortage is that of the engine on most GPUs.
    """
    request = request.for_judge if role is Role.JUDGE else request.for_engines
    sizes = [2**n for n in range(len(indices).bit_length()) if 2**n <= min(len(indices), MOST_PARALLEL)]
    possible = [size for size in sizes if request.model.takes_tensor_parallel(size)]
    lacking: dict[int, Shortage] = {}
    for size in reversed(possible) if role is Role.JUDGE else possible:
        groups = [indices[first : first + size] for first in range(0, len(indices) - size + 1, size)]
        made = [_engine_on_gpus(request, gpus, role, number, group) for number, group in enumerate(groups)]
        made = made[:1] if role is Role.JUDGE else made
        short = [found for found in made if isinstance(found, Shortage)]
        if not short:
            return [found for found in made if isinstance(found, Process)]
        lacking[size] = short[0]
    return lacking[max(lacking)]  # one GPU is always a possible size


def _engine_on_gpus(
    request: Request, gpus: Gpus, role: Role, number: int, group: tuple[int, ...]
) -> Process | Shortage:
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
    beside = memory_module.parts_beside_cache(request, serving, count, with_lora=with_lora)
    rest = device.usable - sum(part.bytes for part in beside)
    cache = max(rest, memory_module.kv_bytes(request, request.limits.max_model_len, serving, count))
    serves = "serves policies" + ("" if gpus.judge else " and judges")
    judges = "answers judges by base weights, so that policies' requests do not wait for votes"
    return Process(
        f"{role} {number}" if with_lora else str(role),
        role,
        group,
        (*beside, memory_module.cache_part(request, cache, serving, count)),
        (serves if with_lora else judges) + (f", cut over {count} GPUs" if count > 1 else ""),
        (
            *table.engine_arguments(request, serving, gpus=count, with_lora=with_lora),
            *table.cache_on_own_gpus(),
        ),
        table.engine_environment(group),
        memory_module.kv_tokens(request, cache, serving, count),
    )


def _trainer_on_gpus(request: Request, gpus: Gpus) -> tuple[Process, RankWeights | None] | Shortage:
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
        memory_module.rank_parts(request, len(indices), sharded=sharded),
        why,
        table.trainer_arguments(request, len(indices), _ranks(indices, sharded=sharded)),
        table.trainer_environment(indices),
    )


def _ranks(indices: tuple[int, ...], *, sharded: bool) -> RankWeights | None:
    if len(indices) == 1:
        return None
    return "sharded" if sharded else "replicated"


def _device(index: int, size: int, share: float) -> Device:
    return Device(f"GPU {index}", size, size - int(size * share))


# The plan -------------------------------------------------------------------------------------------------------------
# The layout for a request, or what is missing and the settings that would make it fit: tried, not guessed.

_LENGTH_STEP = 256
_SHORTEST = 1024
"""Tokens; a remedy names a shorter context or sample only if no other setting helps."""
_SMALLEST_BUDGET = 256
_MOST_GPUS = 16
_LARGEST_GIB = 2**20
RATE_MEASURED_UP_TO = 300 * 10**6
"""Parameters; the model that the default learning rate was measured on has 135 million."""
_LINEAR_ATTENTION = "Qwen3_5"
"""Prefix of the architectures with linear attention, which vLLM cannot serve on a CPU."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings with which a request fits.

    Args:
        words: the settings as a person types them.
        request: the request with these settings.
    """

    words: str
    request: Request


def plan(request: Request) -> Layout:
    """The layout of a request.

    Raises:
        SetupError: it does not fit: the part, the numbers and the settings that would make it fit; or sets of GPUs
            that contradict each other.
    """
    _require_consistent(request)
    found = arrange(request)
    if isinstance(found, Layout):
        notes = (*found.notes, *_notes(request))
        on_disk = 0 if request.training is None else version_bytes(request.model, request.training)
        return replace(found, notes=notes, version_bytes=on_disk)
    ways = [remedy.words for remedy in remedies(request)]
    raise SetupError(f"{request.model.name} does not fit: {found}: {', or '.join(ways)}")


def _require_consistent(request: Request) -> None:
    if request.gpus is None and request.model.experts:
        raise SetupError(
            f"{request.model.name} is a mixture of experts, and vLLM on a CPU crashes if such a model has adapters: "
            "it needs GPUs"
        )
    if request.gpus is None and request.model.architecture.startswith(_LINEAR_ATTENTION):
        raise SetupError(
            f"{request.model.name} has layers of linear attention: vLLM on a CPU needs torchvision for it, which "
            "PyPI has only as CUDA builds: it needs GPUs"
        )
    if request.training is None:
        for option, given in (("--quantise", request.quantise), ("--serve-model", request.serve_model)):
            if given is not None:
                raise SetupError(f"{option} and --no-train contradict each other: leave one out")
    else:
        require_trainable_weights(request.model)


def arrange(request: Request) -> Layout | Shortage:
    """The layout without its arguments, or what is missing."""
    return on_cpu(request) if request.gpus is None else on_gpus(request)


def remedies(request: Request) -> Iterator[Remedy]:
    """Settings with which a request that does not fit would: first limits, then the machine."""
    by_limits = next(_by_limits(request), None)
    if by_limits is not None:
        yield by_limits
    if request.gpus is None:
        yield _more_memory(request)
        return
    quantised = _quantised(request)
    if quantised is not None:
        yield quantised
    another = _another_gpu(request)
    if another is not None:
        yield another
    yield _larger_gpus(request)


def _by_limits(request: Request) -> Iterator[Remedy]:
    """Remedies that change one limit, the cheapest first; then remedies that change several together."""
    singles = (_smaller_budget, _shorter_samples, _shorter_context, _fewer_loras)
    for change in singles:
        if (found := change(request)) is not None:
            yield found
    smallest = _with(request, micro_batch_tokens=min(1024, request.limits.micro_batch_tokens))
    smallest = _with(smallest, max_loras=FEWEST_LORAS)
    for start in (smallest, _with(smallest, max_lora_rank=_needed_rank(request))):
        for change in (_shorter_samples, _shorter_context):
            found = change(start)
            if found is not None:
                yield Remedy(_words(request.limits, found.request.limits), found.request)


def _smaller_budget(request: Request) -> Remedy | None:
    budget = min(request.limits.micro_batch_tokens, request.limits.max_sample_tokens)
    while request.training is not None and (budget := budget // 2) >= _SMALLEST_BUDGET:
        if (found := _fits(request, _with(request, micro_batch_tokens=budget))) is not None:
            return found
    return None


def _shorter_samples(request: Request) -> Remedy | None:
    if request.training is None:
        return None
    return _longest(request, request.limits.max_sample_tokens, lambda n: _with(request, max_sample_tokens=n))


def _shorter_context(request: Request) -> Remedy | None:
    sample = request.limits.max_sample_tokens
    return _longest(
        request,
        request.limits.max_model_len,
        lambda n: _with(request, max_model_len=n, max_sample_tokens=min(n, sample)),
    )


def _fewer_loras(request: Request) -> Remedy | None:
    for count in range(request.limits.max_loras - 1, FEWEST_LORAS - 1, -1):
        if (found := _fits(request, _with(request, max_loras=count))) is not None:
            return found
    return None


def _longest(request: Request, below: int, change: Callable[[int], Request]) -> Remedy | None:
    """The largest length that fits, in whole steps: what needs less memory fits where more does."""
    low, high = _SHORTEST // _LENGTH_STEP - 1, -(-below // _LENGTH_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        if isinstance(arrange(change(middle * _LENGTH_STEP)), Layout):
            low = middle
        else:
            high = middle
    return None if low * _LENGTH_STEP < _SHORTEST else _fits(request, change(low * _LENGTH_STEP))


def _quantised(request: Request) -> Remedy | None:
    """The trainer's base model in 4 bits, with limits if that is not enough."""
    if request.training is None or request.quantise is not None:
        return None
    smaller = replace(request, quantise="nf4")
    recipe = "(with deploy/recipes/quantised.toml)"
    if isinstance(arrange(smaller), Layout):
        return Remedy(f"--quantise nf4 {recipe}", smaller)
    found = next(_by_limits(smaller), None)
    return None if found is None else Remedy(f"--quantise nf4 {found.words} {recipe}", found.request)


def _another_gpu(request: Request) -> Remedy | None:
    gpus = request.gpus
    assert gpus is not None
    if gpus.serve is not None or gpus.judge is not None or gpus.train is not None:
        return None
    for count in range(len(gpus.sizes) + 1, min(_MOST_GPUS, 2 * len(gpus.sizes)) + 1):
        sizes = (*gpus.sizes, *([gpus.sizes[-1]] * (count - len(gpus.sizes))))
        changed = replace(request, gpus=replace(gpus, sizes=sizes))
        if isinstance(arrange(changed), Layout):
            listed = ",".join(f"{size / GIB:g}" for size in sizes)
            return Remedy(f"{count} GPUs (--gpus {listed})", changed)
    return None


def _larger_gpus(request: Request) -> Remedy:
    gpus = request.gpus
    assert gpus is not None
    count = len(gpus.sizes)

    def of(size: int) -> Request:
        sizes = tuple(max(present, size * GIB) for present in gpus.sizes)
        return replace(request, gpus=replace(gpus, sizes=sizes))

    size = _least(lambda size: isinstance(arrange(of(size)), Layout))
    return Remedy(f"{'a GPU' if count == 1 else 'GPUs'} of {size} GiB", of(size))


def _more_memory(request: Request) -> Remedy:
    size = _least(lambda size: isinstance(arrange(replace(request, memory=size * GIB)), Layout))
    return Remedy(f"a machine with {size} GiB of memory", replace(request, memory=size * GIB))


def _least(fits: Callable[[int], bool]) -> int:
    """The fewest GiB that are enough."""
    high = 1
    while not fits(high):
        high *= 2
        if high > _LARGEST_GIB:
            raise SetupError("no machine holds this model: choose a smaller one")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _fits(request: Request, changed: Request) -> Remedy | None:
    if isinstance(arrange(changed), Layout):
        return Remedy(_words(request.limits, changed.limits), changed)
    return None


def _words(before: Limits, after: Limits) -> str:
    names = ("max_model_len", "max_sample_tokens", "micro_batch_tokens", "max_loras", "max_lora_rank")
    changed = [name for name in names if getattr(before, name) != getattr(after, name)]
    if "max_model_len" in changed and after.max_sample_tokens == after.max_model_len:
        changed = [name for name in changed if name != "max_sample_tokens"]  # follows the context
    return " ".join(f"--{name.replace('_', '-')} {getattr(after, name)}" for name in changed)


def _with(request: Request, **changed: int) -> Request:
    return replace(request, limits=replace(request.limits, **changed))


def _needed_rank(request: Request) -> int:
    rank = request.training.rank if request.training else 1
    return next(size for size in ENGINE_RANKS if size >= rank)


def _notes(request: Request) -> Iterator[str]:
    model = request.model
    yield f"the model {model.chat}"
    if model.chat.unread_tools:
        yield (
            "requests whose model may call tools are refused (400), as no parser reads this model's calls: give "
            "--tool-call-parser"
        )
    elif model.chat.tool_parser is None:
        yield (
            "tools of requests are left out, and named in X-Clawloop-Ignored: agents need a model whose template has "
            "tools, e.g. Qwen/Qwen3-1.7B, Qwen/Qwen3-4B or Qwen/Qwen3-8B, which learn on one GPU of 24, 40 or 64 GiB"
        )
    if model.experts:
        yield (
            f"{model.experts} routed experts a layer get no adapters: attention, and shared experts if there are, "
            "are what is trained" + ("" if request.quantise is None else ", and what is kept in 4 bits")
        )
    if request.quantise is not None or request.serve_model is not None:
        yield (
            'engines and trainer compute with different weights: the recipe needs train.loss.correction = "decoupled", '
            "as deploy/recipes/quantised.toml has it"
        )
    if request.training is not None and not is_packed(model, request.limits.max_sample_tokens):
        yield (
            f"{model.architecture} is trained by transformers and PEFT, a sample at a time: what samples share is "
            "computed for each of them"
            + ("" if is_measured(model) else "; its memory was measured for Llama, Mistral and Gemma 3 alone")
        )
    if request.training is not None and request.training.default_rate and model.text_parameters > RATE_MEASURED_UP_TO:
        optimiser = DEFAULT_RECIPE.train.optimiser
        yield (
            "the default learning rate was measured on a model of 135M parameters alone: whatever the size, an update "
            f"moves the adapter by {optimiser.lr * optimiser.grad_clip / optimiser.epsilon:g} at most (lr · grad_clip "
            "/ epsilon); change train.optimiser.lr in a recipe, see docs/learning.md, Rates by size"
        )
    if request.gpus is not None:
        yield "CUDA graphs and buffers between GPUs are estimates; the rest was compared on an H200, for a 4B Qwen3"
