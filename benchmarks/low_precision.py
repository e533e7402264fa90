"""A base model in float32, bfloat16 and 4 bits (NF4), by both backends: memory, time and log-probs side by side.

Weights and tokens are random unless `--model DIR` names a model; log-probs are compared with those of torchtune in
float32. Each runs in a process of its own, so that peak memory is its own.
Run as `make bench ARGS="low-precision"`, with `--gpu` on CUDA.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from clawloop.training.model.families import Backend, Quantisation
from clawloop.training.model.loading import load_model
from clawloop.training.model.lora import LoraShape
from clawloop.training.packing.collate import collate
from clawloop.training.packing.sequences import TokenSequence

_PROMPT, _RESPONSE, _DOCUMENTS = 192, 64, 4
# float32 first: the others are compared with it.
PRECISIONS: tuple[tuple[str, torch.dtype, Quantisation | None], ...] = (
    ("float32", torch.float32, None),
    ("bfloat16", torch.bfloat16, None),
    ("nf4", torch.bfloat16, "nf4"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One backend at one precision.

    Args:
        weights: bytes of the model's tensors, quantised ones at their real size.
        peak: of the process on a CPU, of the allocator on a GPU.
        seconds: of one pass with gradient.
    """

    weights: int
    peak: int
    seconds: float
    logprobs: list[float]


def write_model(folder: Path) -> None:
    """A random model of Qwen3's architecture, 27 million parameters."""
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 1024}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True)).save_pretrained(folder)


def measure(folder: Path, backend: Backend, precision: str, device: torch.device) -> Measured:
    dtype, quantisation = next((dtype, how) for name, dtype, how in PRECISIONS if name == precision)
    torch.manual_seed(0)
    model = load_model(
        folder, LoraShape(), dtype=dtype, device=device, max_tokens=1024, backend=backend, quantisation=quantisation
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.vocab_size, (_DOCUMENTS, _PROMPT + _RESPONSE), generator=generator).tolist()
    sequences = [TokenSequence(str(n), row[:_PROMPT], row[_PROMPT:], 1.0) for n, row in enumerate(ids)]
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
    return Measured(weights, peak, seconds, logprobs)


def _bytes(parameter: torch.Tensor) -> int:
    if not hasattr(parameter, "quantized_data"):
        return parameter.nbytes
    return sum(
        getattr(parameter, part).nbytes for part in ("quantized_data", "quantized_scalers", "quantization_factor")
    )


def report(measured: dict[tuple[str, str], Measured], device: str) -> Table:
    table = Table("backend", "base", "weights, MiB", "peak, MiB", "s", "|Δ log-prob| mean", "largest", title=device)
    [exact] = [torch.tensor(one.logprobs) for key, one in measured.items() if key == ("torchtune", "float32")]
    for (backend, precision), one in measured.items():
        off = (torch.tensor(one.logprobs) - exact).abs()
        sizes = (f"{one.weights / 2**20:.1f}", f"{one.peak / 2**20:.0f}", f"{one.seconds:.2f}")
        table.add_row(backend, precision, *sizes, f"{float(off.mean()):.2g}", f"{float(off.max()):.2g}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="low-precision", description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="on CUDA")
    parser.add_argument("--model", type=Path, help="folder of a model; default: a random one")
    parser.add_argument("--one", nargs=2, metavar=("BACKEND", "PRECISION"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if options.gpu else "cpu")
    if options.gpu and not torch.cuda.is_available():
        sys.exit("--gpu: torch finds no CUDA device on this machine")
    if options.one:
        backend, precision = options.one
        print(json.dumps(asdict(measure(options.model, backend, precision, device))))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder)
        if options.model is None:
            write_model(model)
        measured = {}
        for backend in get_args(Backend):
            for precision, _, _ in PRECISIONS:
                command = [sys.executable, "-m", "benchmarks.low_precision", "--model", str(model)]
                command += ["--one", backend, precision] + (["--gpu"] if options.gpu else [])
                printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                measured[backend, precision] = Measured(**json.loads(printed.splitlines()[-1]))
    Console().print(report(measured, torch.cuda.get_device_name() if options.gpu else "CPU"))


if __name__ == "__main__":
    main()
