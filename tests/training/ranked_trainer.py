"""A program for test_ranked_trainer.py: `clawloop worker trainer --nproc 2`, with shorter waits.

`python -m tests.training.ranked_trainer PROCESS_JSON`.
"""

from __future__ import annotations

import sys

from clawloop.app.processes.trainer import TrainerProcess, run_trainer
from clawloop.core.settings import Settings
from clawloop.core.telemetry.logs import configure_logging

if __name__ == "__main__":
    configure_logging()
    run_trainer(TrainerProcess.model_validate_json(sys.argv[1]), Settings())
