"""A layout for people, within 80 columns, for programs, and as command lines."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from clawloop.app.layout.memory import (
    CPU_PIECE,
    GIB,
    UTILIZATION,
    Device,
    Layout,
    Process,
    Role,
    Serving,
    gibibytes,
)
from clawloop.app.layout.request import Request
from clawloop.training.options import RankWeights

# Tables ---------------------------------------------------------------------------------------------------------------
# A layout for people, within 80 columns, and for programs.

WIDTH = 80
_NAME, _SIZE = 24, 8


def table(layout: Layout) -> str:
    """The layout as text: devices, processes with the purposes of their memory, notes, and the arguments."""
    lines = [*_devices(layout), ""]
    for alike in _alike(layout.processes):
        lines += [*_process(alike), ""]
    lines += _figures(layout)
    for note in layout.notes:
        lines += textwrap.wrap(f"Note: {note}.", WIDTH, subsequent_indent="  ")
    lines.append("")
    for process in layout.processes:
        if process.arguments:
            lines += [f"{process.name}:", *_command(process)]
    return "\n".join(lines)


def overview(layout: Layout) -> list[str]:
    """A line for each device, for each process that holds a model, for each figure and for each note."""
    lines = [*_devices(layout)]
    for process in layout.processes:
        if process.role is not Role.SERVICE:
            each = f" on each of {len(process.gpus)} GPUs" if len(process.gpus) > 1 else ""
            lines.append(f"{process.name}: {gibibytes(process.bytes)}{each}, {process.why}")
    return [*lines, *_figures(layout), *(f"Note: {note}." for note in layout.notes)]


def as_data(layout: Layout) -> dict[str, object]:
    """The layout as plain data; sizes in bytes, on each device of a process."""
    devices = [
        {
            "name": device.name,
            "bytes": device.bytes,
            "kept_free_bytes": device.kept_free,
            "used_bytes": layout.used(index),
            "processes": [process.name for process in layout.on(index)],
        }
        for index, device in enumerate(layout.devices)
    ]
    processes = [
        {
            **asdict(process),
            "bytes": process.bytes,
            "environment": dict(process.environment),
            "role": process.role.value,
            "parts": [{**asdict(part), "name": part.name.value} for part in process.parts],
        }
        for process in layout.processes
    ]
    return {
        "device": layout.kind,
        "devices": devices,
        "processes": processes,
        "trainer_ranks": layout.ranks,
        "max_model_len": layout.max_model_len,
        "version_bytes_on_disk": layout.version_bytes,
        "notes": list(layout.notes),
    }


def _devices(layout: Layout) -> Iterator[str]:
    yield f"{'':<12}{'GiB':>8}{'used':>8}{'free':>8}  processes"
    for index, device in enumerate(layout.devices):
        used = layout.used(index)
        names = [process.name for process in layout.on(index) if process.role is not Role.SERVICE]
        services = len(layout.on(index)) - len(names)
        names += [f"{services} services"] if services else []
        sizes = "".join(f"{size / GIB:>8.1f}" for size in (device.bytes, used, device.bytes - used))
        yield f"{device.name:<12}{sizes}  {', '.join(names) or 'nothing'}"


def _alike(processes: Sequence[Process]) -> list[list[Process]]:
    """Groups of neighbouring processes with equal parts; all services are one group."""
    return [list(group) for _, group in groupby(processes, lambda one: one.role is Role.SERVICE or one.parts)]


def _process(alike: list[Process]) -> Iterator[str]:
    first = alike[0]
    if first.role is Role.SERVICE:
        yield _line("services", sum(process.bytes for process in alike), "no model in them")
        yield from (_line(f"  {process.name}", process.bytes, process.parts[0].how) for process in alike)
        return
    names = first.name if len(alike) == 1 else f"{first.name} to {alike[-1].name.rsplit(' ', 1)[-1]}"
    where = f", on each of {len(first.gpus)} GPUs" if len(first.gpus) > 1 else ", each" if len(alike) > 1 else ""
    yield _line(names, first.bytes, f"in all{where}")
    yield from textwrap.wrap(first.why, WIDTH, initial_indent="  ", subsequent_indent="  ")
    for part in first.parts:
        words = textwrap.wrap(part.how, WIDTH - _NAME - _SIZE - 2) or [""]
        yield _line(f"  {part.name}", part.bytes, words[0])
        yield from (" " * (_NAME + _SIZE + 2) + more for more in words[1:])


def _line(name: str, size: int, words: str) -> str:
    number = f"{size / GIB:.2f}" if size < 10 * GIB else f"{size / GIB:.1f}"
    return f"{name:<{_NAME}}{number:>{_SIZE}}  {words}".rstrip()


def _figures(layout: Layout) -> Iterator[str]:
    cached = min(process.cached_tokens for process in layout.processes if process.role is Role.ENGINE)
    context = layout.max_model_len
    yield f"An engine caches {cached:,} tokens: {cached / context:.1f} contexts of {context:,}."
    if layout.version_bytes:
        yield f"A version takes {gibibytes(layout.version_bytes)} on disk."
    if layout.ranks is not None:
        held = "whole in each" if layout.ranks == "replicated" else "divided among them (FSDP2)"
        yield f"The trainer's ranks have the base model {held}."


def _command(process: Process) -> Iterator[str]:
    words = [f"{name}={value}" for name, value in process.environment.items()]
    # A flag and its value stay together.
    for argument in process.arguments:
        if words and words[-1].startswith("--") and not argument.startswith("--"):
            words[-1] += f" {shlex.quote(argument)}"
        else:
            words.append(argument)
    line = " "
    for word in words:
        if len(line) + 1 + len(word) > WIDTH - 2:
            yield f"{line} \\"
            line = "   "
        line += f" {word}"
    yield line


# Command lines --------------------------------------------------------------------------------------------------------
# Command-line arguments and environment variables of engines and trainer, derived from a layout.

# Bytes; glibc gives what is larger pages of its own, which go back to the machine when it is freed.
_MMAP_FROM = str(2**20)


def engine_arguments(request: Request, serving: Serving, *, gpus: int, with_lora: bool) -> tuple[str, ...]:
    """Arguments of vLLM's `api_server`, without model, address and size of the cache."""
    limits = request.limits
    arguments = ["--dtype", request.dtype, "--max-model-len", str(limits.max_model_len)]
    arguments += ["--max-num-seqs", str(serving.seqs), "--max-num-batched-tokens", str(serving.batched_tokens)]
    if with_lora:
        arguments += ["--enable-lora", "--max-lora-rank", str(limits.max_lora_rank)]
        arguments += ["--max-loras", str(limits.max_loras), "--max-cpu-loras", str(limits.max_cpu_loras)]
    if gpus > 1:
        arguments += ["--tensor-parallel-size", str(gpus)]
    return (*arguments, *request.model.chat.engine_arguments)


def cache_on_shared_gpu(cache: int, engine: int, device: Device) -> tuple[str, ...]:
    """A cache of this size, whatever else the GPU holds.

    vLLM then takes no share of the GPU, but still compares one with what is free at its start
    (`v1.worker.utils.request_memory`), where the trainer may hold all of its own.

    Args:
        engine: bytes of all of the engine.
    """
    share = max(1, 100 * engine // device.bytes) / 100  # rounded down: the next hundredth may be the trainer's
    return "--kv-cache-memory-bytes", str(cache), "--gpu-memory-utilization", f"{share:.2f}"


def cache_on_own_gpus() -> tuple[str, ...]:
    """Arguments that give the KV cache the rest of vLLM's share, which vLLM measures better than we compute it."""
    return "--gpu-memory-utilization", str(UTILIZATION)


def cpu_arguments(cache: int) -> tuple[str, ...]:
    """Arguments of an engine on a CPU beside those of every engine.

    Args:
        cache: bytes of its KV cache.
    """
    return "--long-prefill-token-threshold", str(CPU_PIECE), "--kv-cache-memory-bytes", str(cache)


def trainer_arguments(request: Request, gpus: int, ranks: RankWeights | None = None, kept: int = 0) -> tuple[str, ...]:
    """Arguments of `clawloop worker trainer`, without model and adapters.

    Args:
        kept: see `memory.kept_tokens`.
    """
    limits = request.limits
    arguments = ["--device", "cuda" if gpus else "cpu", "--dtype", request.dtype]
    arguments += ["--max-tokens", str(limits.max_sample_tokens), "--micro-batch-tokens", str(limits.micro_batch_tokens)]
    if kept:
        arguments += ["--recompute-beyond", str(kept)]
    if request.quantise is not None:
        arguments += ["--quantise", request.quantise]
    if request.serve_model is not None:
        arguments.append("--engines-quantised")
    return (*arguments, "--nproc", str(max(1, gpus)), *(() if ranks is None else ("--ranks", ranks)))


def engine_environment(gpus: tuple[int, ...]) -> dict[str, str]:
    """Environment variables of an engine: its GPUs, or on a CPU a setting of malloc that returns freed memory.

    vLLM packs each weight for oneDNN and frees the original, which leaves gaps in glibc's heap.
    """
    if not gpus:
        return {"MALLOC_MMAP_THRESHOLD_": _MMAP_FROM}
    # CUDA numbers the fastest GPU first by default, nvidia-smi by their bus.
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}


def trainer_environment(gpus: tuple[int, ...]) -> dict[str, str]:
    """Variables that keep freed memory usable although the tensors of each sample have other sizes."""
    if gpus:
        return engine_environment(gpus) | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    return {
        # Tensors below 32 MiB else come from glibc's heap, in whose gaps the next ones do not fit: a step of Qwen3-0.6B
        # over 1,000 tokens then held 350 to 700 MiB instead of 160.
        "MALLOC_MMAP_THRESHOLD_": _MMAP_FROM,
        # In bfloat16 oneDNN compiles half a MiB for each shape of a product, and keeps 1,024 of them.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    }
