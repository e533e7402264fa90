"""What `clawloop plan` says each part of the memory takes, beside what it takes.

    python -m benchmarks.plan_memory [--model DIR] [--quantise nf4] [--only trainer|engine]
    python -m benchmarks.plan_memory --gpu [--engine-arg=ARGUMENT] …

Without a model: one of Qwen3-0.6B's exact shape with random weights, on a GPU of Qwen3-4B's. Everything is real: a
trainer's steps, and vLLM.

On the CPU vLLM is started four times. Runtime is what imports and the same work on a model of a megabyte take; the
other parts are what comes on top of it. Resident memory is read, so what is swapped out or shared with other programs
is not seen. With `--gpu` one vLLM is started with what `clawloop up` would give it, and the trainer takes its steps on
the same GPU meanwhile; torch says what tensors took, nvidia-smi the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

from benchmarks.plan_memory_engine import compare, engine_on_gpu
from clawloop.layout.arguments import trainer_environment
from clawloop.local.tiny_model import ensure_tiny_model
from tests.random_model import QWEN3_4B, write_random_model

MIB = 2**20


def compare_trainer(tiny: Path, model: Path, further: Sequence[str], *, gpu: bool) -> dict[str, tuple[int, int]]:
    """Of each part of a trainer: bytes as planned and as measured.

    Args:
        further: `nf4`, or nothing.
    """
    program = [sys.executable, "-m", "benchmarks.plan_memory_trainer", str(tiny), str(model)]
    done = subprocess.run(
        [*program, "cuda" if gpu else "cpu", *further],
        env=dict(os.environ) | trainer_environment((0,) if gpu else ()),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return {name: (planned, measured) for name, (planned, measured) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the first GPU, which engine and trainer share")
    parser.add_argument("--model", type=Path, help="a folder in bfloat16; a random one if left out")
    parser.add_argument("--quantise", choices=("nf4",), help="the trainer's base model")
    parser.add_argument(
        "--engine-arg", action="append", default=[], help="with --gpu: of vLLM, such as --enforce-eager"
    )
    parser.add_argument("--only", choices=("trainer", "engine"), help="one of the two")
    options = parser.parse_args()
    further = [] if options.quantise is None else [options.quantise]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        tiny, log = ensure_tiny_model(Path(folder)), Path(folder) / "vllm.log"
        model: Path = options.model or _random_model(Path(folder), gpu=options.gpu)
        if options.gpu and options.only != "trainer":
            show("engine", running.enter_context(engine_on_gpu(model, log, options.engine_arg)))
        if options.only != "engine":
            show("trainer", compare_trainer(tiny, model, further, gpu=options.gpu))
        if not options.gpu and options.only != "trainer":
            show("engine", compare(tiny, model, log))


def _random_model(folder: Path, *, gpu: bool) -> Path:
    if not gpu:
        return write_random_model(folder / "qwen3-0.6b")
    model = folder / "qwen3-4b"
    # A process that ends leaves nothing on the GPU.
    writer = get_context("spawn").Process(target=write_random_model, args=(model, QWEN3_4B, "cuda"))
    writer.start()
    writer.join()
    if writer.exitcode != 0:
        raise RuntimeError(f"the model could not be made: exit code {writer.exitcode}")
    return model


def show(who: str, parts: dict[str, tuple[int, int]]) -> None:
    print(f"{who:<24}{'planned':>10}{'measured':>10}  MiB, measured / planned")
    for name, (planned, measured) in parts.items():
        print(f"  {name:<22}{planned / MIB:>10.0f}{measured / MIB:>10.0f}  {measured / planned:.2f}", flush=True)


if __name__ == "__main__":
    main()
