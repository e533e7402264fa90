"""Program of `test_distributed.py`, for two ranks under torchrun or one process without it.

Usage: `python -m tests.training.two_ranks BASE OUT sharded|replicated`.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from clawloop.core.algorithms.scoring import Scores, score
from clawloop.core.contracts.training import StepBatch, VersionRef
from clawloop.core.errors import AdapterUnreadable, StepDiverged
from clawloop.core.recipes.recipe import Distillation, Loss, Optimiser, Train
from clawloop.training import step_runner
from clawloop.training.adapters import files
from clawloop.training.adapters.files import Adapter, BaseIdentity, begin, resume, save_version
from clawloop.training.model import token_scores
from clawloop.training.model.loading import load_model, load_sharded_model
from clawloop.training.model.port import LoraShape, PolicyModel, adapter_tensors
from clawloop.training.packing import Limits
from clawloop.training.ranks import Ranks, ignore_status
from clawloop.training.step import make_optimizer, train_step
from clawloop.training.step_runner import StepRunner
from tests.training import methods
from tests.training.steps import Reported, completed, never, samples_of, setup_of, step_of
from tests.training.tiny import VOCAB, random_batch, shake_adapter

CPU = torch.device("cpu")
LORA = LoraShape(rank=4, alpha=8.0)
SHARDED, REPLICATED = "sharded", "replicated"
IDENTITY = BaseIdentity(name="tiny", fingerprint="same in both runs")
# A budget of 40 makes five micro-batches of nine samples: an odd number for two ranks.
LIMITS = Limits(budget_tokens=40, max_tokens=256, vocab_size=VOCAB)
RECIPE = Train(
    loss=Loss(kl=0.1, distillation=0.5),
    distillation=Distillation(top_k=5),
    optimiser=Optimiser(lr=5e-3, weight_decay=0.1),
)


def load(base: Path, ranks: Ranks, dtype: torch.dtype) -> PolicyModel:
    make = load_sharded_model if ranks.world_size > 1 and SHARDED in sys.argv else load_model
    return make(base, LORA, dtype=dtype, device=CPU)


def four_steps(base: Path, out: Path, ranks: Ranks) -> list[dict[str, object]]:
    """Two steps, a save, a resume into a fresh model, two more steps and a save."""
    whole = load_model(base, LORA, dtype=torch.float32, device=CPU)
    shake_adapter(whole)
    batch = random_batch(whole, hints=True, version=0)
    reports = []
    model = load(base, ranks, torch.float32)
    optimizer = make_optimizer(model, RECIPE.optimiser)
    begin(model, optimizer)
    for version in (1, 2, 3, 4):
        report = train_step(model, optimizer, batch, RECIPE, LIMITS, parent=version - 1, ranks=ranks)
        samples = {str(sample): asdict(metrics) for sample, metrics in report.samples.items()}
        advantages = {str(sample): values for sample, values in report.advantages.items()}
        taught = {str(sample): [asdict(hint) for hint in hints] for sample, hints in report.taught.items()}
        reports.append({**asdict(report), "samples": samples, "advantages": advantages, "taught": taught})
        if version in (2, 4):
            written = save_version(out, version, model, optimizer, IDENTITY, writes=ranks.is_first)
            [*found] = ranks.all_gather(written)
            assert found[0] is not None
            assert found[1:] == [None] * (ranks.world_size - 1)
            model = load(base, ranks, torch.float32)
            optimizer = make_optimizer(model, RECIPE.optimiser)
            resume(found[0].path, found[0].sha256, model, optimizer, IDENTITY)
    return reports


def one_rank_fails(base: Path, ranks: Ranks) -> dict[str, object]:
    """Rank 1 meets a bad number in its forward; both must raise, and both can go on afterwards."""
    model = load(base, ranks, torch.float32)
    shake = random_batch(load_model(base, LORA, dtype=torch.float32, device=CPU), version=0)
    optimizer = make_optimizer(model, RECIPE.optimiser)
    begin(model, optimizer)
    raised, first = None, None
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:

            def score_or_fail(*arguments: Any, **named: Any) -> Scores:
                if torch.is_grad_enabled():
                    raise StepDiverged("found on rank 1")
                return score(*arguments, **named)

            patch.setattr(token_scores, "score", score_or_fail)
        try:
            first = train_step(model, optimizer, shake, RECIPE, LIMITS, ranks=ranks).loss
        except StepDiverged as error:
            raised = str(error)
    after = train_step(model, optimizer, shake, RECIPE, LIMITS, ranks=ranks)
    return {"raised": ranks.all_gather(raised), "first": first, "after": after.loss}


def one_rank_runs_out_of_memory(base: Path, out: Path, ranks: Ranks) -> dict[str, object]:
    """Rank 1 does so in its first forward with gradient; both begin again with smaller micro-batches."""
    reported = Reported()
    failed = ranks.rank == 0

    def score_or_fail(*arguments: Any, **named: Any) -> Scores:
        nonlocal failed
        if torch.is_grad_enabled() and not failed:
            failed = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(*arguments, **named)

    runner = StepRunner(setup_of(base, out / "memory", ranks=REPLICATED), ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_scores, "score", score_or_fail)
        trained = runner.train(step_of(samples_of(base, 1), 1), reported, never)
    micro_batches = [None if one is None else one.figures.micro_batches for one in ranks.all_gather(trained)]
    return {"reported": [line for line in reported if "out of memory" in line], "micro_batches": micro_batches}


def one_rank_loses_its_disk(base: Path, out: Path, ranks: Ranks) -> dict[str, object]:
    """Rank 1 cannot read the parent, then a teacher, which both ranks have checked; both must raise, and can go on."""
    setup = setup_of(base, out / "disk", ranks=SHARDED if SHARDED in sys.argv else REPLICATED)
    runner = StepRunner(setup, ranks)

    def take(step: StepBatch) -> VersionRef:
        trained = ranks.broadcast(runner.train(step, ignore_status, never))
        return completed(trained).version

    first = take(step_of(samples_of(base, 1), 1))
    second = take(step_of(samples_of(base, 2), 2, first))
    third = step_of(samples_of(base, 3, version=1), 3, second, teachers={1: first})
    raised: list[str | None] = []
    for reader in (files, step_runner):
        with pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 1:
                patch.setattr(reader, "read_adapter", _disk_is_gone)
            try:
                take(third)
            except AdapterUnreadable as error:
                raised.append(str(error))
    return {"raised": ranks.all_gather(raised), "after": take(third).n}


def _disk_is_gone(path: Path, *, base: BaseIdentity) -> Adapter:
    raise AdapterUnreadable(f"{path.name[:2]} cannot be read")


def in_bfloat16(base: Path, ranks: Ranks) -> float:
    model = load(base, ranks, torch.bfloat16)
    optimizer = make_optimizer(model, RECIPE.optimiser)
    begin(model, optimizer)
    batch = random_batch(load_model(base, LORA, dtype=torch.float32, device=CPU), version=0)
    train_step(model, optimizer, batch, RECIPE, LIMITS, ranks=ranks)
    return train_step(model, optimizer, batch, RECIPE, LIMITS, ranks=ranks).loss


def two_steps_of_each_method(base: Path, ranks: Ranks) -> dict[str, dict[str, object]]:
    """Each method's second report, and what its adapter came to after it, as one list of numbers.

    What the first step takes was answered by version 0, what the second takes by one that is neither that nor the
    parent: its hints are read by that version.
    """
    whole = load_model(base, LORA, dtype=torch.float32, device=CPU)
    shake_adapter(whole)
    older = adapter_tensors(whole)
    model = load(base, ranks, torch.float32)
    found: dict[str, dict[str, object]] = {}
    for method in methods.METHODS:
        recipe = methods.train_part(method, lr=1e-3)
        first, second = (methods.batch_of(method, whole, version=version) for version in (0, 1))
        optimizer = make_optimizer(model, recipe.optimiser)
        begin(model, optimizer)
        train_step(model, optimizer, first, recipe, methods.LIMITS, ranks=ranks)
        report = train_step(
            model, optimizer, second, recipe, methods.LIMITS, parent=2, read_version=lambda _: older, ranks=ranks
        )
        adapter = torch.cat([tensor.flatten() for tensor in adapter_tensors(model).values()])
        found[method] = {"loss": report.loss, "grad_norm": report.grad_norm, "adapter": adapter.tolist()}
    return found


def run(base: Path, out: Path, ranks: Ranks) -> dict[str, object]:
    return {
        # Passes of a sharded model are collectives: a rank that fails in one ends.
        "memory": None if SHARDED in sys.argv else one_rank_runs_out_of_memory(base, out, ranks),
        "reports": four_steps(base, out, ranks),
        "methods": two_steps_of_each_method(base, ranks),
        "failure": one_rank_fails(base, ranks),
        "disk": one_rank_loses_its_disk(base, out, ranks),
        "bfloat16": in_bfloat16(base, ranks),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = run(Path(sys.argv[1]), Path(sys.argv[2]), Ranks.current())
    if dist.get_rank() == 0:
        (Path(sys.argv[2]) / "result.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    # Seen now and then on a busy machine, after all work was done: "terminate called without an active
    # exception" while Python shuts down, from a thread of torch's. So Python does not shut down.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
