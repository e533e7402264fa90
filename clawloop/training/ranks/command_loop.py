"""The command loop of several ranks: the first rank broadcasts commands, the others serve them.

Commands use a gloo group of their own: torch's default time-out of 30 minutes would end ranks that wait for work, and
on GPUs the default group is for tensors. A ping goes round now and then, so that a dead rank is noticed while idle.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from clawloop.contracts.progress import StatusCallback
from clawloop.contracts.training import StepBatch, TrainedStep
from clawloop.errors import PermanentError, TransientError
from clawloop.training.progress import ignore_status
from clawloop.training.ranks.collectives import Ranks

if TYPE_CHECKING:
    from clawloop.training.step_runner import StepRunner

log = logging.getLogger(__name__)

# Longer than any trainer idles; dead ranks are noticed by the ping.
COMMAND_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Ping:
    """Every rank answers."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Every rank ends."""


Command: TypeAlias = StepBatch | Ping | Shutdown


def join(device: torch.device, command_timeout: timedelta = COMMAND_TIMEOUT) -> Ranks:
    """Initialises the process group of the ranks that torchrun started; returns when all have joined."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://"))
    # torchrun keeps one store over all its restarts, and torch writes the ranks' addresses under the same keys each
    # time: the first rank to join read the address of a dead rank, and was refused or waited for ever. The restart
    # count is that of this machine's torchrun, and all ranks are on one machine.
    attempt = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=attempt, rank=rank, world_size=size)
    group = dist.new_group(backend="gloo", timeout=command_timeout)
    return Ranks.current(group)


def leave_process_group() -> None:
    """Destroys the process group, if there is one; only for a rank that ended without an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_step(
    runner: StepRunner, step: StepBatch, report: StatusCallback, should_stop: Callable[[], bool]
) -> TrainedStep:
    """On the first rank: take this step on all ranks.

    Raises:
        ClawloopError: as `StepRunner.train`; all ranks go on to wait for the next command.
        Exception: anything else leaves the ranks out of step; all must be restarted.
    """
    runner.ranks.broadcast(_as_command(step))
    try:
        trained = runner.train(step, report, should_stop)
    except (PermanentError, TransientError):
        runner.ranks.all_gather(None)
        raise
    runner.ranks.all_gather(None)
    assert trained is not None  # only other ranks get None
    return trained


def ping(runner: StepRunner) -> None:
    """On the first rank: check that all ranks answer. Raises RuntimeError if one is gone."""
    runner.ranks.broadcast(_as_command(Ping()))
    runner.ranks.all_gather(None)


def shutdown_ranks(runner: StepRunner) -> None:
    """On the first rank: end the others. Raises RuntimeError if one has ended already."""
    runner.ranks.broadcast(_as_command(Shutdown()))


def serve_rank(runner: StepRunner) -> None:
    """On every other rank: run the first rank's commands until `Shutdown`.

    Raises:
        Exception: an error of this rank alone; its process must end, so that the others notice.
    """
    while True:
        command = runner.ranks.broadcast(_as_command(Shutdown()))  # this value is replaced by the first rank's
        if isinstance(command, Shutdown):
            return
        if isinstance(command, StepBatch):
            try:
                runner.train(command, ignore_status, _never)
            except (PermanentError, TransientError) as error:
                # The first rank raises the same error and reports it.
                log.info("step ended", extra={"step": command.n, "error": type(error).__name__})
        runner.ranks.all_gather(None)


def _as_command(command: Command) -> Command:
    return command


def _never() -> bool:
    return False
