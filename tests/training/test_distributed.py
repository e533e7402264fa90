"""Two ranks on gloo take the same steps as one process, whether they divide the base model or each hold it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from clawloop.training.adapters.files import read_adapter
from clawloop.training.model.loading import load_model
from clawloop.training.ranks import Ranks
from clawloop.training.scoring import ScoringPass, hinted_member, shard_batch
from tests.training.methods import METHODS
from tests.training.tiny import random_batch, save_checkpoint
from tests.training.two_ranks import CPU, LIMITS, LORA, REPLICATED, SHARDED, run

# Two processes that import torch at once, and three where tests share the machine; a bound for ranks that hang.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"), tied=False)


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("alone")
    return out, json.loads(json.dumps(run(base, out, Ranks())))


@pytest.fixture(scope="module", params=[SHARDED, REPLICATED])
def two_ranks(
    base: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("together")
    # --standalone takes a free port.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "tests.training.two_ranks", str(base), str(out), request.param]
    with subprocess.Popen([*torchrun, *worker], stderr=subprocess.PIPE, text=True) as ranks:
        try:
            _, stderr = ranks.communicate(timeout=900)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # killed, it would leave its ranks behind
            raise
    assert ranks.returncode == 0, stderr
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return out, result


def test_two_ranks_see_the_same_losses_as_one_process(
    alone: tuple[Path, dict[str, Any]], two_ranks: tuple[Path, dict[str, Any]]
) -> None:
    for one, two in zip(alone[1]["reports"], two_ranks[1]["reports"], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert two["tokens"] == one["tokens"]
        assert two["samples"].keys() == one["samples"].keys()
        assert two["advantages"].keys() == one["advantages"].keys()
        for sample, advantages in one["advantages"].items():
            assert two["advantages"][sample] == pytest.approx(advantages, abs=1e-4)
        assert (one["fillers"], two["fillers"]) == (0, two["micro_batches"] - one["micro_batches"])
    assert any(two["fillers"] for two in two_ranks[1]["reports"])
    assert all(two["advantages"] for two in two_ranks[1]["reports"])


def test_two_ranks_make_the_same_adapter_as_one_process(
    base: Path, alone: tuple[Path, dict[str, Any]], two_ranks: tuple[Path, dict[str, Any]]
) -> None:
    for version in (2, 4):
        [one], [two] = (list(out.glob(f"v{version}-*")) for out, _ in (alone, two_ranks))
        expected, found = read_adapter(one).tensors, read_adapter(two).tensors
        for name, tensor in expected.items():
            assert (found[name] - tensor).abs().max() < 1e-4
        assert any(tensor.abs().max() > 1e-3 for name, tensor in expected.items() if "lora_B" in name)


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_train_every_method_as_one_process_does(
    method: str, alone: tuple[Path, dict[str, Any]], two_ranks: tuple[Path, dict[str, Any]]
) -> None:
    one, two = (run["methods"][method] for _, run in (alone, two_ranks))
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    expected, found = torch.tensor(one["adapter"]), torch.tensor(two["adapter"])
    # A tenth of one update: AdamW divides by a gradient's own size, so noise in a tiny one grows.
    assert (found - expected).abs().max() < 1e-4
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert one["grad_norm"] > 1e-3


def test_an_error_on_one_rank_is_raised_on_both_and_the_next_step_succeeds(
    alone: tuple[Path, dict[str, Any]], two_ranks: tuple[Path, dict[str, Any]]
) -> None:
    failure = two_ranks[1]["failure"]
    assert failure["raised"] == ["logprob_T of a forward pass is not finite"] * 2
    assert alone[1]["failure"]["raised"] == [None]
    # The step after the failure is the first that moves anything.
    assert failure["first"] is None
    assert failure["after"] == pytest.approx(alone[1]["failure"]["first"], abs=1e-5)


def test_a_disk_that_one_rank_loses_ends_the_step_on_both_and_the_next_step_succeeds(
    alone: tuple[Path, dict[str, Any]], two_ranks: tuple[Path, dict[str, Any]]
) -> None:
    assert two_ranks[1]["disk"] == {"raised": [["v2 cannot be read", "v1 cannot be read"]] * 2, "after": 3}
    assert alone[1]["disk"] == {"raised": [[]], "after": 3}


@pytest.mark.parametrize("two_ranks", [REPLICATED], indirect=True)
def test_a_rank_out_of_memory_makes_both_begin_again_with_smaller_micro_batches(
    alone: tuple[Path, dict[str, Any]], two_ranks: tuple[Path, dict[str, Any]]
) -> None:
    memory = two_ranks[1]["memory"]
    assert memory["reported"] == ["step 1: out of memory; again with micro-batches of 20 tokens"]
    assert memory["micro_batches"][0] > alone[1]["memory"]["micro_batches"][0]
    assert memory["micro_batches"][1] is None
    [one], [two] = (list((out / "memory").glob("*/v1-*")) for out, _ in (alone, two_ranks))
    expected, found = read_adapter(one).tensors, read_adapter(two).tensors
    assert max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items()) < 1e-4


def test_two_ranks_train_in_bfloat16(
    alone: tuple[Path, dict[str, Any]], two_ranks: tuple[Path, dict[str, Any]]
) -> None:
    assert two_ranks[1]["bfloat16"] == pytest.approx(alone[1]["bfloat16"], abs=0.02)


def test_every_rank_runs_the_same_number_of_forwards_in_each_pass(base: Path) -> None:
    model = load_model(base, LORA, dtype=torch.float32, device=CPU)
    batch = [
        *random_batch(model, hints=True, version=2),
        *random_batch(model, hints=True, version=5)[:3],
    ]
    hinted = {v: tuple(m for m, one in enumerate(batch) if one.version == v and one.hinted_prompts) for v in (2, 5)}
    joined, plain, teacher = (
        ScoringPass(version=2, policy=True, hinted=hinted[2]),
        ScoringPass(version=0, reference=True),
        ScoringPass(version=5, hinted=hinted[5]),
    )
    fillers = 0
    for world in (1, 2, 3, 16):
        shards = [shard_batch(batch, LIMITS, (joined, plain, teacher), rank=r, world_size=world) for r in range(world)]
        assert len({len(shard.trained) for shard in shards}) == 1
        members = [m for shard in shards for pack in shard.trained for m in pack.members]
        assert sorted(members) == list(range(len(batch)))
        for one in (joined, plain, teacher):
            assert len({len(shard.scored[one]) for shard in shards}) == 1
        fillers += sum(pack.is_filler for shard in shards for pack in shard.scored[joined])
        for shard in shards:
            own = {m for pack in shard.trained for m in pack.members}
            read = {one: [m for pack in packs for m in pack.members] for one, packs in shard.scored.items()}
            assert sorted(read[joined]) == sorted([*own, *(hinted_member(m) for m in own.intersection(hinted[2]))])
            assert sorted(read[plain]) == sorted(own)
            assert sorted(read[teacher]) == sorted(hinted_member(m) for m in own.intersection(hinted[5]))
    assert fillers
