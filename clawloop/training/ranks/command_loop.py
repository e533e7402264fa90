"""Several ranks that wait for the first one to say what to do.

Knows nothing about who asks the first rank. Commands go over a gloo group of their own: torch's default time-out
of 30 minutes would end ranks that wait for work, and on GPUs the default group belongs to tensors. A no-op goes
round now and then, so that a dead rank is seen before there is work.
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

from clawloop.contracts.training import StepBatch, TrainedStep
from clawloop.errors import PermanentError, TransientError
from clawloop.training.ranks.ranks import Ranks

if TYPE_CHECKING:
    from clawloop.training.step_runner import Say, StepRunner

log = logging.getLogger(__name__)

# Longer than any trainer idles; the no-op is what notices the dead.
COMMAND_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Nothing:
    """Everybody says that it is there."""


@dataclass(frozen=True, slots=True)
class Leave:
    """There is no more to do."""


Command: TypeAlias = StepBatch | Nothing | Leave


def join(device: torch.device, command_timeout: timedelta = COMMAND_TIMEOUT) -> Ranks:
    """Become one of the ranks that torchrun started; returns when all are there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank, size = next(rendezvous("env://"))
    # torchrun keeps one store for all its restarts, and torch writes the ranks' addresses under the same names each
    # time: who came first read the address of a rank that is dead, was refused, or waited for ever. The count is that
    # of this machine's torchrun, and all ranks are on one machine.
    ours = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=ours, rank=rank, world_size=size)
    group = dist.new_group(backend="gloo", timeout=command_timeout)
    return Ranks.current(group)


def leave_process_group() -> None:
    """Leave the ranks' group, if there is one; only for a rank that ended well."""
    if dist.is_initialized():
        dist.destroy_process_group()


def broadcast_step(model: StepRunner, step: StepBatch, say: Say, should_stop: Callable[[], bool]) -> TrainedStep:
    """On the first rank: have all ranks take this step.

    Raises:
        ClawloopError: as `StepRunner.train`; all ranks go on to wait for the next command.
        Exception: anything else leaves the ranks apart; the group must be started anew.
    """
    model.ranks.first(_as_command(step))
    try:
        trained = model.train(step, say, should_stop)
    except (PermanentError, TransientError):
        model.ranks.gather(None)
        raise
    model.ranks.gather(None)
    assert trained is not None  # only other ranks get None
    return trained


def ping(model: StepRunner) -> None:
    """On the first rank: see that all are there. Raises RuntimeError if one is not."""
    model.ranks.first(_as_command(Nothing()))
    model.ranks.gather(None)


def shutdown_ranks(model: StepRunner) -> None:
    """On the first rank: let the others end. Raises RuntimeError if one has ended already."""
    model.ranks.first(_as_command(Leave()))


def serve_rank(model: StepRunner) -> None:
    """On every other rank: do what the first one says until it says to leave.

    Raises:
        Exception: this rank alone met something; its process must end, so that the others see it.
    """
    while True:
        command = model.ranks.first(_as_command(Leave()))  # what we pass is replaced by the first rank's
        if isinstance(command, Leave):
            return
        if isinstance(command, StepBatch):
            try:
                model.train(command, _say_nothing, _never)
            except (PermanentError, TransientError) as error:
                # The first rank raises the same, and says so.
                log.info("step ended", extra={"step": command.n, "error": type(error).__name__})
        model.ranks.gather(None)


def _as_command(command: Command) -> Command:
    return command


def _say_nothing(at: str) -> None:
    del at


def _never() -> bool:
    return False
