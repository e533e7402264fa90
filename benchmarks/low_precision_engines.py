"""vLLM at several precisions: bytes of its weights, its memory, and its log-probs of given tokens.

Used by `benchmarks.low_precision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.plan_memory_engine import MIB, Start, running_engine, used_on_gpu
from benchmarks.quantised_copy import Method, write_copy


@dataclass(frozen=True, slots=True)
class EngineKind:
    """
    Args:
        copy: the quantised copy that it serves; None: the model itself.
        exact_activations: with four-bit weights, not rounded to eight bits, as vLLM does on CPUs that have AMX.
        further: arguments of vLLM's own.
    """

    name: str
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    copy: Method | None = None
    exact_activations: bool = False
    further: tuple[str, ...] = ()


ON_CPU = (
    EngineKind("float32", "float32"),
    EngineKind("bfloat16"),
    EngineKind("awq", copy="awq"),
    EngineKind("gptq", copy="gptq"),
    EngineKind("awq, 16-bit activations", copy="awq", exact_activations=True),
)
ON_GPU = (
    EngineKind("bfloat16"),
    EngineKind("awq", copy="awq"),
    EngineKind("gptq", copy="gptq"),
    EngineKind("fp8", further=("--quantization", "fp8")),  # rounded as it is loaded
)


@dataclass(frozen=True, slots=True)
class Engine:
    """What one engine took and said.

    Args:
        weights: bytes of the tensors in its folder; None where it rounds them itself.
        peak: bytes of all its processes, or in use on the GPU, beyond its KV cache.
        logprobs: of the last tokens of each document.
        adapted: the same by an adapter.
        ended: why there are none.
    """

    weights: int | None
    peak: int | None
    logprobs: list[float]
    adapted: list[float]
    ended: str = ""


def measure_engine(
    kind: EngineKind,
    model: Path,
    adapter: Path,
    folder: Path,
    documents: Sequence[list[int]],
    scored: int,
    *,
    gpu: bool,
) -> Engine:
    """Start vLLM with its adapter slots, as Clawloop does, and have it score the documents.

    Args:
        adapter: a version's folder.
        folder: an empty one, for the copy.
        scored: tokens at the end of each document.
    """
    served = model if kind.copy is None else write_copy(model, folder / kind.copy, kind.copy)
    environment = (("VLLM_CPU_INT4_W4A8", "0"),) if kind.exact_activations else ()
    start = Start(served, cache=128 * MIB, dtype=kind.dtype, environment=environment, further=kind.further)
    # What is read as float32 from a folder in bfloat16 is twice as large.
    size = (served / "model.safetensors").stat().st_size * (2 if kind.dtype == "float32" else 1)
    weights = None if "--quantization" in kind.further else size
    before = used_on_gpu() if gpu else 0
    log = folder / f"{kind.name.replace(' ', '-')}.log"
    try:
        with running_engine(start, log) as engine:
            if not gpu:
                engine.clear_peaks()
            logprobs = [value for ids in documents for value in engine.score(ids)[-scored:]]
            engine.load("one", adapter)
            adapted = [value for ids in documents for value in engine.score(ids, "one")[-scored:]]
            peak = used_on_gpu() - before if gpu else engine.peak()
    except (RuntimeError, OSError) as error:
        return Engine(weights, None, [], [], f"ended: {_last_error(log) or error}")
    return Engine(weights, peak - start.cache, logprobs, adapted)


def _last_error(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "Error" in line]
    return lines[-1].rsplit("] ", 1)[-1].strip()[:200] if lines else ""
