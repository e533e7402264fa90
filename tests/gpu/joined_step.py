"""Program of test_two_ranks_on_cuda.py: one step by the ranks that torchrun started.

`python -m tests.gpu.joined_step BASE OUT DEVICE sharded|replicated float32|bfloat16`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from clawloop.training.ranks import ignore_status, join, leave_process_group
from clawloop.training.step_runner import StepRunner
from tests.training.steps import never, samples_of, setup_of, step_of


def main(base: Path, out: Path, device: str, kind: str, dtype: str) -> None:
    setup = setup_of(base, out, device=device, ranks=kind, dtype=dtype)
    runner = StepRunner(setup, join(setup.torch_device()))
    trained = runner.train(step_of(samples_of(base, 1), 1), ignore_status, never)
    if trained is not None:
        figures = trained.figures
        found = {"loss": figures.loss, "grad_norm": figures.grad_norm, "path": trained.version.path}
        (out / "step.json").write_text(json.dumps(found), encoding="utf-8")
    leave_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
