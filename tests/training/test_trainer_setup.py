"""What a trainer refuses when it starts, in one line each."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clawloop.core.errors import SetupError
from clawloop.training.setup import TrainerSetup, cores
from tests.training.tiny import save_checkpoint
from tests.verbs import clawloop, refusal


def without_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()


def of_another_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (without_weights, "has neither model.safetensors nor model.safetensors.index.json"),
        (of_another_family, "is of the family 'mamba'; the trainer knows"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
    ids=["no weights", "another family", "no config"],
)
def test_a_folder_that_cannot_be_trained_is_one_line(tmp_path: Path, damage: Callable[[Path], None], said: str) -> None:
    folder = save_checkpoint(tmp_path / "model", tied=True)
    damage(folder)
    line = refusal(clawloop("worker", "trainer", "--model", str(folder), "--data", str(tmp_path / "data")))
    assert line.startswith("clawloop: --model: ")
    assert said in line


def test_a_trainer_whose_gpu_is_gone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a GPU failed in a step: the trainer is started again, and finds none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    setup = TrainerSetup(model=save_checkpoint(tmp_path / "model", tied=True), adapters=tmp_path, device="cuda")
    for found_out in (setup.check, setup.torch_device):  # a trainer's start, and that of a rank
        with pytest.raises(SetupError, match="--device cuda: torch finds no CUDA device on this machine"):
            found_out()


def test_ranks_without_a_gpu_each_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    setup = TrainerSetup(model=save_checkpoint(tmp_path / "model", tied=True), adapters=tmp_path)
    setup.check(nproc=2)
    with pytest.raises(SetupError, match="--nproc 3: each rank needs a GPU of its own, and torch finds 2 here"):
        setup.check(nproc=3)


def test_sharded_ranks_of_a_quantised_model_are_refused_before_a_batch_is_claimed(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", tied=True)
    options = (
        "worker",
        "trainer",
        "--model",
        str(folder),
        "--data",
        str(tmp_path),
        "--quantise",
        "nf4",
        "--nproc",
        "2",
    )
    assert "--ranks replicated" in refusal(clawloop(*options))


def test_a_trainer_that_had_a_gpu_does_not_go_on_silently_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = TrainerSetup(model=save_checkpoint(tmp_path / "model", tied=True), adapters=tmp_path / "adapters")
    setup.note_device(setup.torch_device())
    assert setup.torch_device().type == "cpu"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        setup.note_device(setup.torch_device())
    for found_out in (setup.check, setup.torch_device):  # a trainer's start, and that of a rank
        with pytest.raises(SetupError, match=r"no CUDA device, .* had one .* --device cpu .* delete that file"):
            found_out()
    [note] = (tmp_path / "adapters").glob(".gpu-on-*")
    note.rename(tmp_path / "note")  # as told to an operator whose machine has none for good
    assert setup.torch_device().type == "cpu"
    (tmp_path / "note").rename(note)
    on_cpu = setup.model_copy(update={"device": "cpu"})
    assert on_cpu.torch_device().type == "cpu"
    # The folder may be shared: another machine never had one.
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    assert setup.torch_device().type == "cpu"


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("1000 100000", 1),
        ("max 100000", 3),
        ("6400000 100000", 3),
        (None, 3),
    ],
)
def test_there_is_a_thread_for_each_core_that_the_process_may_use(
    quota: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 cores a container may have three by affinity, or fewer by its quota."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 9})
    if quota is not None:
        (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{quota}\n")
    assert cores(tmp_path) == expected


def test_a_trainer_computes_on_no_more_threads_than_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5})
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        TrainerSetup(model=tmp_path, adapters=tmp_path).bound_threads()
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
