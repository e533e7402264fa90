"""Program of test_rank_restarts.py: ranks that divide the base model; memory runs out on rank 1 in its first life.

`python -m tests.training.sharded_memory agent BASE OUT`; torchrun starts it again as `… rank BASE OUT`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.training.torchrun import launch_two_ranks


def _rank(base: Path, out: Path) -> None:
    # Not above: the agent needs none of it, and it takes seconds.
    from clawloop.app.processes.process_exit import exit_process
    from clawloop.training.model import decoder
    from clawloop.training.ranks import join, leave_process_group
    from clawloop.training.step_runner import StepRunner
    from tests.training.steps import Reported, never, samples_of, setup_of, step_of

    def attend_or_fail(*arguments: Any, **named: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decoder.attend_along_branches(*arguments, **named)

    torch.set_num_threads(1)
    ranks = join(torch.device("cpu"))
    if not ranks.is_first and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        # In the middle of a forward pass, where the other rank waits for its share of the next layer.
        vars(decoder)["attend_along_branches"] = attend_or_fail
    reported = Reported()
    runner = StepRunner(setup_of(base, out / "adapters", ranks="sharded", micro_batch_tokens=120), ranks)
    trained = runner.train(step_of(samples_of(base, 1), 1), reported, never)
    if trained is not None:
        found = {"path": trained.version.path, "reported": [line for line in reported if "again" in line]}
        (out / "step.json").write_text(json.dumps(found), encoding="utf-8")
    leave_process_group()
    exit_process(0)


if __name__ == "__main__":
    role, base, out = sys.argv[1:]
    if role == "rank":
        _rank(Path(base), Path(out))
    else:
        launch_two_ranks("tests.training.sharded_memory", "rank", base, out, restarts=1)
