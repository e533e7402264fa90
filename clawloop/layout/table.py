"""A layout for people, within 80 columns, and for programs."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from clawloop.layout.parts import GIB, Layout, Process, Role, gibibytes

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
    """The same as plain data; sizes in bytes, on each device of a process."""
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
    """Neighbours that hold the same, and all services together."""
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
