"""What `test_kill_and_resume.py` runs in a process of its own: trainers that are killed in the middle of a step.

Usage: `python -m tests.training.killed_steps BASE OUT`. For each method a child takes a step and saves version 1,
then kills itself after the first micro-batch of the next one that has a gradient. Writes the signals they died of.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from clawloop.recipe import Train
from clawloop.training.adapter import BaseIdentity, WrittenVersion
from clawloop.training.checkpoint import begin, save_version
from clawloop.training.evidence import Progress
from clawloop.training.loading import load_model
from clawloop.training.model import Lora, PolicyModel
from clawloop.training.step import make_optimizer, train_step
from tests.training.methods import LIMITS, METHODS, batch_of, train_part

IDENTITY = BaseIdentity(name="tiny", fingerprint="same in all runs")


def recipe_of(method: str) -> Train:
    return train_part(method, lr=1e-3)


def fresh(method: str, base: Path) -> tuple[PolicyModel, torch.optim.Optimizer]:
    model = load_model(base, Lora(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    return model, make_optimizer(model, recipe_of(method).optimiser)


def take_step(
    method: str,
    base: Path,
    out: Path,
    version: int,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    *,
    die: bool = False,
) -> WrittenVersion:
    """The step to this version, on a batch that depends on method and version only."""
    clean, _ = fresh(method, base)
    batch = batch_of(method, clean, version=0, seed=version)

    def report(progress: Progress) -> None:
        if die and progress.stage == "train":
            os.kill(os.getpid(), signal.SIGKILL)

    train_step(model, optimizer, batch, recipe_of(method), LIMITS, parent=version - 1, report=report)
    written = save_version(out / method, version, model, optimizer, IDENTITY)
    assert written is not None
    return written


def killed(method: str, base: Path, out: Path) -> int:
    """The signal the child died of; 0 if it did not."""
    child = os.fork()
    if child == 0:
        model, optimizer = fresh(method, base)
        begin(model, optimizer)
        take_step(method, base, out, 1, model, optimizer)
        take_step(method, base, out, 2, model, optimizer, die=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    signals = {method: killed(method, Path(sys.argv[1]), Path(sys.argv[2])) for method in METHODS}
    sys.stdout.write(f"{json.dumps(signals)}\n")
