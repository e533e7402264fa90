"""The layout for a request, or what is missing and the settings that would make it fit: tried, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from clawloop.errors import SetupError
from clawloop.layout.on_cpu import on_cpu
from clawloop.layout.on_gpus import on_gpus
from clawloop.layout.parts import GIB, Layout
from clawloop.layout.peft_layer import is_measured
from clawloop.layout.request import ENGINE_RANKS, FEWEST_LORAS, Limits, Request
from clawloop.layout.served_copy import require_trainable_weights
from clawloop.layout.shortage import Shortage
from clawloop.layout.trainer import version_bytes

_LENGTH_STEP = 256
_SHORTEST = 1024
"""Tokens; a remedy names a shorter context or sample only if no other setting helps."""
_SMALLEST_BUDGET = 256
_MOST_GPUS = 16
_LARGEST_GIB = 2**20
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
            "PyPI has only as CUDA builds, and reads its prompts in chunks, where a request's seed crashes the engine: "
            "it needs GPUs"
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
    """One limit that is enough alone, those first that cost least; else several together."""
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
    if request.training is not None and not is_measured(model):
        yield (
            f"{model.architecture} is trained by the transformers backend, whose activations were measured for Llama, "
            "Mistral and Gemma 3 alone"
        )
    if request.gpus is not None:
        yield "CUDA graphs and buffers between GPUs are estimates; the rest was compared on an H200, for a 4B Qwen3"
