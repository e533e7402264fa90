"""Program of test_rank_restarts.py: ranks under torchrun that join, the last of which dies until the last attempt.

`python -m tests.training.joining_rank agent FOLDER RESTARTS`; torchrun starts it again as `… rank FOLDER RESTARTS`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch

from tests.training.torchrun import launch_two_ranks


def _rank(folder: Path, restarts: int) -> None:
    # Not above: the agent needs none of it, and it takes seconds.
    from clawloop.app.processes.process_exit import exit_process
    from clawloop.training.ranks import join, leave_process_group

    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    ranks = join(torch.device("cpu"), timedelta(seconds=20))
    present = ranks.all_gather(os.environ["RANK"])
    (folder / f"{attempt}-{os.environ['RANK']}").write_text(" ".join(present or []))
    ranks.all_gather(None)
    if attempt < restarts and not ranks.is_first:
        os._exit(9)
    ranks.all_gather(None)  # as a rank that waits for work, it sees the other die
    leave_process_group()
    exit_process(0)


if __name__ == "__main__":
    role, folder, restarts = sys.argv[1:]
    if role == "rank":
        _rank(Path(folder), int(restarts))
    else:
        launch_two_ranks("tests.training.joining_rank", "rank", folder, restarts, restarts=int(restarts))
