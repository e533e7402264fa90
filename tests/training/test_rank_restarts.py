"""Ranks that end are started again by torchrun, and join each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from clawloop.training.adapters.files import read_adapter
from clawloop.training.ranks import ignore_status
from clawloop.training.step_runner import StepRunner
from tests.training.steps import completed, never, samples_of, setup_of, step_of

RESTARTS = 1


@pytest.mark.long
@pytest.mark.timeout(200)
def test_restarted_ranks_join_at_the_first_attempt(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.training.joining_rank", "agent", str(tmp_path), str(RESTARTS)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stderr[-2000:]
    joined = {path.name for path in tmp_path.iterdir()}
    assert joined == {f"{attempt}-{rank}" for attempt in range(RESTARTS + 1) for rank in range(2)}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_of_a_divided_model_take_half_at_once_after_one_ran_out_of_memory(qwen3: Path, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.training.sharded_memory", "agent", str(qwen3), str(tmp_path)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads((tmp_path / "step.json").read_text())
    assert found["reported"] == ["step 1: a rank ran out of memory; again with micro-batches of 60 tokens"]
    assert not list((tmp_path / "adapters").glob(".attempt-*"))
    setup = setup_of(qwen3, tmp_path / "alone", micro_batch_tokens=60)
    alone = completed(StepRunner(setup).train(step_of(samples_of(qwen3, 1), 1), ignore_status, never))
    expected = read_adapter(tmp_path / "alone" / alone.version.path).tensors
    tensors = read_adapter(tmp_path / "adapters" / found["path"]).tensors
    assert max(float((tensors[name] - tensor).abs().max()) for name, tensor in expected.items()) < 1e-4
