"""Program of `test_kill_and_resume.py`: trainers that are killed in the middle of a step.

Usage: `python -m tests.training.killed_steps BASE OUT`. For each of `KILLS` a child takes a step and saves version 1,
then kills itself in the next one, after the first micro-batch of that epoch. Writes the signals they died of.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from clawloop.core.recipes.recipe import Train
from clawloop.training.adapters.files import BaseIdentity, WrittenVersion, begin, save_version
from clawloop.training.model.loading import load_model
from clawloop.training.model.port import LoraShape, PolicyModel
from clawloop.training.ranks import Progress
from clawloop.training.step import make_optimizer, train_step
from tests.training.methods import LIMITS, METHODS, batch_of, train_part

IDENTITY = BaseIdentity(name="tiny", fingerprint="same in all runs")


# No recipe goes through its batch more than once, and users' may.
TWICE = "combined"


def recipe_of(method: str) -> Train:
    return train_part(method, lr=1e-3, epochs=2 if method == TWICE else 1)


# Method and epoch: after the first the model in memory has moved, and still nothing of that may be on disk.
KILLS = [(method, epoch) for method in METHODS for epoch in range(1, recipe_of(method).optimiser.epochs + 1)]


def fresh(method: str, base: Path) -> tuple[PolicyModel, torch.optim.Optimizer]:
    model = load_model(base, LoraShape(rank=4, alpha=8.0), dtype=torch.float32, device=torch.device("cpu"))
    return model, make_optimizer(model, recipe_of(method).optimiser)


def take_step(
    method: str,
    base: Path,
    folder: Path,
    version: int,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    *,
    die_in: int | None = None,
) -> WrittenVersion:
    """The step to this version, on a batch that depends on method and version only."""
    clean, _ = fresh(method, base)
    batch = batch_of(method, clean, version=0, seed=version)
    epoch = 0

    def report(progress: Progress) -> None:
        nonlocal epoch
        if progress.stage == "train" and progress.done == 1:
            epoch += 1
            if epoch == die_in:
                os.kill(os.getpid(), signal.SIGKILL)

    train_step(model, optimizer, batch, recipe_of(method), LIMITS, parent=version - 1, on_progress=report)
    written = save_version(folder, version, model, optimizer, IDENTITY)
    assert written is not None
    return written


def left_by(method: str, epoch: int, out: Path) -> Path:
    """The folder of versions of the child that died there."""
    return out / f"{method}-{epoch}"


def killed(method: str, epoch: int, base: Path, out: Path) -> int:
    """The signal the child died of; 0 if it did not."""
    child = os.fork()
    if child == 0:
        model, optimizer = fresh(method, base)
        begin(model, optimizer)
        folder = left_by(method, epoch, out)
        take_step(method, base, folder, 1, model, optimizer)
        take_step(method, base, folder, 2, model, optimizer, die_in=epoch)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    base, out = Path(sys.argv[1]), Path(sys.argv[2])
    signals = {left_by(method, epoch, out).name: killed(method, epoch, base, out) for method, epoch in KILLS}
    sys.stdout.write(f"{json.dumps(signals)}\n")
