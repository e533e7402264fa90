"""A base model at several precisions, in the trainer and in vLLM, side by side: memory, time and log-probs.

The trainer has it in float32, bfloat16 and 4 bits (NF4), by both backends; vLLM in float32, bfloat16, AWQ and GPTQ, and
`--gpu` in FP8 too. Weights and tokens are random unless `--model DIR` names a folder in bfloat16 with one file of
weights. Log-probs are compared with those of torchtune in float32; a copy in four bits also with what the same
four-bit weights give in float32, and each engine with each trainer. Every one runs in processes of its own.
Run as `make bench ARGS="low-precision"`, with `--gpu` on CUDA, with `--trainer-only` without engines.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast, get_args

import torch

from benchmarks.low_precision_engines import ON_CPU, ON_GPU, Engine, measure_engine
from benchmarks.quantised_copy import Method, write_unpacked
from benchmarks.report import Figure, Result
from clawloop.errors import SetupError
from clawloop.training.adapters.files import Adapter, BaseIdentity, adapter_files, read_adapter, write_version
from clawloop.training.model.adapter import adapter_tensors, set_adapter
from clawloop.training.model.base_weights import BaseWeights
from clawloop.training.model.families import Backend, Quantisation
from clawloop.training.model.loading import load_model
from clawloop.training.model.lora import LoraShape
from clawloop.training.packing.collate import collate
from clawloop.training.packing.sequences import TokenSequence
from tests.random_model import write_random_model
from tests.training.tiny import shake_adapter

_PROMPT, RESPONSE, _DOCUMENTS = 192, 64, 4
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
"""Qwen3's architecture, 27 million parameters."""
# float32 first: the others are compared with it.
PRECISIONS: tuple[tuple[str, torch.dtype, Quantisation | None], ...] = (
    ("float32", torch.float32, None),
    ("bfloat16", torch.bfloat16, None),
    ("nf4", torch.bfloat16, "nf4"),
)
_EXACT = "torchtune float32"


@dataclass(frozen=True, slots=True)
class Measured:
    """One backend at one precision.

    Args:
        weights: bytes of the model's tensors, quantised ones at their real size.
        peak: of the process on a CPU, of the allocator on a GPU.
        seconds: of one pass with gradient.
        logprobs: of the base model.
        adapted: of the base model with an adapter.
    """

    weights: int
    peak: int
    seconds: float
    logprobs: list[float]
    adapted: list[float]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", action="store_true", help="on CUDA")
    parser.add_argument("--model", type=Path, help="folder of a model in bfloat16; default: a random one")
    parser.add_argument("--trainer-only", action="store_true", help="without engines")


def run(options: argparse.Namespace) -> Result:
    """
    Raises:
        SetupError: `--gpu` without CUDA.
    """
    if options.gpu and not torch.cuda.is_available():
        raise SetupError("--gpu: torch finds no CUDA device on this machine")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model: Path = options.model or write_random_model(folder / "random", SHAPE)
        adapter = write_adapter(model, folder / "adapters")
        trainers = _trainers(model, adapter, folder, gpu=options.gpu)
        engines = {} if options.trainer_only else _engines(model, adapter, folder, gpu=options.gpu)
    raw: dict[str, list[float]] = {}
    for who, found in (("trainer", trainers), ("engine", engines)):
        for name, one in found.items():
            raw |= {f"{who} {name}": one.logprobs, f"{who} {name}, adapter": one.adapted}
    return Result(rows=list(_rows(trainers, engines)), raw=raw)


def write_adapter(model: Path, folder: Path) -> Path:
    """A random one, which moves log-probs about as far as training does; returns a version's folder."""
    policy = load_model(model, LoraShape(), dtype=torch.float32, device=torch.device("cpu"))
    shake_adapter(policy, 0.03)
    base = BaseIdentity(name=model.name, fingerprint=BaseWeights(model).fingerprint())
    return write_version(folder, 1, adapter_files(Adapter(LoraShape(), adapter_tensors(policy), base))).path


def _trainers(model: Path, adapter: Path, folder: Path, *, gpu: bool) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for backend in get_args(Backend):
        for precision, _, _ in PRECISIONS:
            found[f"{backend} {precision}"] = _in_a_process(model, adapter, backend, precision, gpu=gpu)
    for method in get_args(Method):
        unpacked = write_unpacked(model, folder / f"{method}-unpacked", method)
        measured = _in_a_process(unpacked, adapter, "torchtune", "float32", gpu=gpu)
        found[f"torchtune float32, {method}'s weights"] = measured
    return found


def _in_a_process(model: Path, adapter: Path, backend: Backend, precision: str, *, gpu: bool) -> Measured:
    command = [sys.executable, "-m", "benchmarks.low_precision", str(model), str(adapter), backend, precision]
    command.append("cuda" if gpu else "cpu")
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Measured(**json.loads(printed.splitlines()[-1]))


def _engines(model: Path, adapter: Path, folder: Path, *, gpu: bool) -> dict[str, Engine]:
    documents = documents_of(json.loads((model / "config.json").read_text())["vocab_size"])
    found: dict[str, Engine] = {}
    for kind in ON_GPU if gpu else ON_CPU:
        own = folder / f"engine-{len(found)}"
        own.mkdir()
        found[kind.name] = measure_engine(kind, model, adapter, own, documents, RESPONSE, gpu=gpu)
    return found


def documents_of(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    ids: list[list[int]] = torch.randint(vocab, (_DOCUMENTS, _PROMPT + RESPONSE), generator=generator).tolist()
    return ids


def measure(folder: Path, adapter: Path, backend: Backend, precision: str, device: torch.device) -> Measured:
    """In a process of its own, so that peak memory is its own."""
    dtype, quantisation = next((dtype, how) for name, dtype, how in PRECISIONS if name == precision)
    torch.manual_seed(0)
    model = load_model(
        folder, LoraShape(), dtype=dtype, device=device, max_tokens=1024, backend=backend, quantisation=quantisation
    )
    documents = documents_of(model.vocab_size)
    sequences = [TokenSequence(str(n), row[:_PROMPT], row[_PROMPT:], 1.0) for n, row in enumerate(documents)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    logprobs: list[float] = []
    started = time.perf_counter()
    for document in range(_DOCUMENTS):
        found = model(collate(sequences, [document], share_prefixes=False).to(device)).logprobs_N
        found.sum().backward()  # type: ignore[no-untyped-call]
        logprobs += found.detach().float().tolist()
    seconds = time.perf_counter() - started
    assert isinstance(model, torch.nn.Module)
    weights = sum(_bytes(parameter) for parameter in model.parameters())
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else of_process
    set_adapter(model, read_adapter(adapter).tensors)
    adapted: list[float] = []
    with torch.no_grad():
        for document in range(_DOCUMENTS):
            scored = model(collate(sequences, [document], share_prefixes=False).to(device))
            adapted += scored.logprobs_N.float().tolist()
    return Measured(weights, peak, seconds, logprobs, adapted)


def _bytes(parameter: torch.Tensor) -> int:
    if not hasattr(parameter, "quantized_data"):
        return parameter.nbytes
    return sum(
        getattr(parameter, part).nbytes for part in ("quantized_data", "quantized_scalers", "quantization_factor")
    )


def _rows(trainers: Mapping[str, Measured], engines: Mapping[str, Engine]) -> Iterator[Mapping[str, Figure]]:
    """First what each takes and how far it is from float32, then how far engines are from trainers."""
    exact = trainers[_EXACT]
    for name, trainer in trainers.items():
        yield _row("trainer", name, _EXACT, _offs(trainer, exact), trainer.weights, trainer.peak)
    for name, engine in engines.items():
        yield _row("engine", name, _EXACT, _offs(engine, exact), engine.weights, engine.peak, engine.ended)
    for name, engine in engines.items():
        own = f"torchtune float32, {name.split(',')[0]}'s weights"
        others = ["torchtune bfloat16", "torchtune nf4"] + ([own] if own in trainers else [])
        for other in others if engine.logprobs else ():
            yield _row("engine", name, other, _offs(engine, trainers[other]))


def _row(
    who: str,
    name: str,
    beside: str,
    off: Sequence[float] | None,
    weights: int | None = None,
    peak: int | None = None,
    note: str = "",
) -> Mapping[str, Figure]:
    base, largest, adapted, largest_adapted = (None,) * 4 if off is None else (f"{one:.2g}" for one in off)
    return {
        "": who,
        "base": name,
        "weights, MiB": None if weights is None else weights / 2**20,
        "peak, MiB": None if peak is None else peak / 2**20,
        "beside the trainer's": beside,
        "|Δ log-prob| mean": base,
        "largest": largest,
        "with an adapter": adapted,
        "its largest": largest_adapted,
        "note": note,
    }


def _offs(found: Measured | Engine, exact: Measured) -> Sequence[float] | None:
    """Mean and largest difference, of the base model and with the adapter; None without log-probs."""
    if not found.logprobs:
        return None
    base = (torch.tensor(found.logprobs) - torch.tensor(exact.logprobs)).abs()
    adapted = (torch.tensor(found.adapted) - torch.tensor(exact.adapted)).abs()
    return [float(base.mean()), float(base.max()), float(adapted.mean()), float(adapted.max())]


if __name__ == "__main__":
    folder, adapter, backend, precision, device = sys.argv[1:]
    found = measure(Path(folder), Path(adapter), cast(Backend, backend), precision, torch.device(device))
    print(json.dumps(asdict(found)))
