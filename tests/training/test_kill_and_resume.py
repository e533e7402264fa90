"""A trainer killed in the middle of a step resumes from the disk with the same result, for every method."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from clawloop.training.adapters.files import begin, resume
from tests.training.killed_steps import IDENTITY, KILLS, fresh, left_by, take_step
from tests.training.tiny import save_checkpoint

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def left_behind(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of versions, one for each of `KILLS`, of trainers killed in their second step."""
    out = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", "tests.training.killed_steps", str(base), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        left_by(method, epoch, out).name: signal.SIGKILL for method, epoch in KILLS
    }
    return out


def test_a_kill_falls_into_a_later_epoch() -> None:
    assert any(epoch > 1 for _, epoch in KILLS)


@pytest.mark.parametrize(("method", "epoch"), KILLS)
def test_resumed_after_a_kill_training_gives_the_same_files_as_uninterrupted(
    method: str, epoch: int, base: Path, left_behind: Path, tmp_path: Path
) -> None:
    model, optimizer = fresh(method, base)
    begin(model, optimizer)
    straight = [take_step(method, base, tmp_path, version, model, optimizer) for version in (1, 2)]

    left = left_by(method, epoch, left_behind)
    [first] = left.glob("v*")
    model, optimizer = fresh(method, base)
    torch.manual_seed(99)
    resume(first, straight[0].sha256, model, optimizer, IDENTITY)
    resumed = take_step(method, base, left, 2, model, optimizer)

    assert straight[0].sha256 != straight[1].sha256
    for one, other in zip([version.path for version in straight], [first, resumed.path], strict=True):
        assert one.name == other.name
        assert {f.name: f.read_bytes() for f in one.iterdir()} == {f.name: f.read_bytes() for f in other.iterdir()}
