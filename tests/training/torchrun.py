"""Starts two ranks of a test's program under torchrun, as the trainer's process does."""

from __future__ import annotations

import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def launch_two_ranks(module: str, *arguments: str, restarts: int) -> None:
    """Returns once both ranks have ended; torchrun starts both again, at most so many times, when one dies."""
    launched = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    elastic_launch(launched, sys.executable)("-m", module, *arguments)
