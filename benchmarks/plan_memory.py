"""What `clawloop plan` says each part of the memory takes, beside what it takes, on the CPU.

    python -m benchmarks.plan_memory [--model DIR] [--only trainer|engine]

Without a model: one of Qwen3-0.6B's exact shape with random weights. Everything is real: a trainer's steps, and vLLM
started four times. Runtime is what imports and the same work on a model of a megabyte take; the other parts are what
comes on top of it. Resident memory is read, so what is swapped out or shared with other programs is not seen.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.plan_memory_engine import compare
from clawloop.layout.arguments import trainer_environment
from clawloop.local.tiny_model import ensure_tiny_model
from tests.random_model import write_random_model

MIB = 2**20


def compare_trainer(tiny: Path, model: Path) -> dict[str, tuple[int, int]]:
    """Of each part of a trainer: bytes as planned and as measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.plan_memory_trainer", str(tiny), str(model)],
        env=dict(os.environ) | trainer_environment(()),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return {name: (planned, measured) for name, (planned, measured) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder in bfloat16; a random Qwen3-0.6B if left out")
    parser.add_argument("--only", choices=("trainer", "engine"), help="one of the two")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tiny = ensure_tiny_model(Path(folder))
        model: Path = options.model or write_random_model(Path(folder) / "qwen3-0.6b")
        if options.only != "engine":
            show("trainer", compare_trainer(tiny, model))
        if options.only != "trainer":
            show("engine", compare(tiny, model, Path(folder) / "vllm.log"))


def show(who: str, parts: dict[str, tuple[int, int]]) -> None:
    print(f"{who:<24}{'planned':>10}{'measured':>10}  MiB, measured / planned")
    for name, (planned, measured) in parts.items():
        print(f"  {name:<22}{planned / MIB:>10.0f}{measured / MIB:>10.0f}  {measured / planned:.2f}", flush=True)


if __name__ == "__main__":
    main()
