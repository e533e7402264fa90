"""The ranks that take one step together: values exchanged, errors raised on all, progress, and the loop of commands."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from clawloop.core.contracts.training import Pace, StatusCallback, StepBatch, TrainedStep
from clawloop.core.errors import (
    AdapterUnreadable,
    AdapterUnusable,
    ClawloopError,
    DiskFull,
    ModelUnsupported,
    NothingToTrain,
    PermanentError,
    RankOutOfMemory,
    StepDiverged,
    StreamsUnusable,
    TrainerUnavailable,
    TransientError,
)
from clawloop.training.memory import is_out_of_memory

if TYPE_CHECKING:
    from clawloop.training.step_runner import StepRunner


# Progress -------------------------------------------------------------------------------------------------------------
# Progress reports of a step, for heartbeats.

# With gradient a token is read forward, once more where layers are recomputed, and backward, which costs two readings.
TRAINED_WORK = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """A micro-batch is finished.

    Args:
        stage: `policy`, `reference` or `teacher`, several joined by `and` if one pass has these roles; `answered`, the
            version that answered; `train`; or `check`, under the weights as they are.
        done, of: micro-batches of this rank in this stage.
        tokens: of this micro-batch.
        pace: of this rank; None if it is not measured.
    """

    stage: str
    done: int
    of: int
    tokens: int = 0
    pace: Pace | None = None

    def __str__(self) -> str:
        what = "training" if self.stage == "train" else f"scoring ({self.stage})"
        return f"{what}, micro-batch {self.done} of {self.of}"


ProgressCallback = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    del progress


def ignore_status(status: str, pace: Pace | None = None) -> None:
    del status, pace


class PaceMeter:
    """Passes reports of progress on with the pace of the step.

    Args:
        report: gets them.
        work: tokens of all micro-batches that will be reported, each that is trained counted `TRAINED_WORK` times.
        clock: seconds.
    """

    def __init__(self, report: ProgressCallback, work: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._work = work
        self._clock = clock
        self._done = 0
        self._began = self._last = self._stage_began = clock()
        self._stage_tokens = 0

    def __call__(self, progress: Progress) -> None:
        now = self._clock()
        if progress.done == 1:
            self._stage_began, self._stage_tokens = self._last, 0
        self._last = now
        self._stage_tokens += progress.tokens
        self._done += progress.tokens * (TRAINED_WORK if progress.stage == "train" else 1)
        in_stage = now - self._stage_began
        pace = None
        if in_stage > 0 and self._done:
            left = (now - self._began) / self._done * max(0, self._work - self._done)
            pace = Pace(self._stage_tokens / in_stage, left)
        self._report(replace(progress, pace=pace))


# Collectives ----------------------------------------------------------------------------------------------------------
# The ranks that take one step together, or a single process: values exchanged, and errors raised on all ranks.
#
# A rank that stopped alone would leave the others waiting in a collective until their time-out. This module does not
# import models, which take seconds to load.

Value = TypeVar("Value")
_SHARED = (
    StepDiverged,
    StreamsUnusable,
    NothingToTrain,
    AdapterUnusable,
    AdapterUnreadable,
    DiskFull,
    ModelUnsupported,
    TrainerUnavailable,
)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the ranks that train together.

    Args:
        rank: 0 writes files and talks to Temporal.
        world_size: number of ranks.
        group: process group for Python objects; torch's default group if None.
    """

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None

    @classmethod
    def current(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """The ranks of torch's default process group; a single rank if there is none."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size(), group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def raise_on_all_ranks(self, enabled: bool = True) -> Iterator[None]:
        """Raises an error of one rank on all ranks when the block ends; no collective may run inside.

        Of several errors, all ranks raise the lowest rank's.

        Args:
            enabled: False where a collective may run inside: an error then ends its rank.

        Raises:
            RankOutOfMemory: on several ranks, for what a single process raises as torch's own error.
        """
        if self.world_size == 1 or not enabled:
            yield
            return
        own: ClawloopError | None = None
        try:
            yield
        except _SHARED as error:
            own = error
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            own = RankOutOfMemory(f"out of memory on rank {self.rank}")
        for raised in self.all_gather(own):
            if raised is not None:
                raise raised

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Gives every rank the sum of all ranks' gradients, bit for bit the same; a collective for tensors."""
        if self.world_size == 1:
            return
        gradients = [parameter.grad for parameter in parameters]
        assert all(gradient is not None for gradient in gradients)  # fillers have gradients of zero
        # One exchange instead of hundreds of small ones.
        flat = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        dist.all_reduce(flat)
        start = 0
        for gradient in gradients:
            assert gradient is not None
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()

    def broadcast(self, value: Value) -> Value:
        """The first rank's value, on all ranks; a collective."""
        if self.world_size == 1:
            return value
        values: list[Value] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def all_gather(self, value: Value) -> list[Value]:
        """Every rank's value, in order of rank, on all ranks; a collective."""
        if self.world_size == 1:
            return [value]
        values: list[Value] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values


# Commands -------------------------------------------------------------------------------------------------------------
# The command loop of several ranks: the first rank broadcasts commands, the others serve them.
#
# Commands use a gloo group of their own: torch's default time-out of 30 minutes would end ranks that wait for work,
# and on GPUs the default group is for tensors. A ping goes round now and then, so that a dead rank is noticed while
# idle.

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
    """Take this step on all ranks; called on the first rank.

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
    """Check that all ranks answer; called on the first rank. Raises RuntimeError if one is gone."""
    runner.ranks.broadcast(_as_command(Ping()))
    runner.ranks.all_gather(None)


def shutdown_ranks(runner: StepRunner) -> None:
    """End all other ranks; called on the first rank. Raises RuntimeError if one has ended already."""
    runner.ranks.broadcast(_as_command(Shutdown()))


def serve_rank(runner: StepRunner) -> None:
    """Run the first rank's commands until `Shutdown`; called on every other rank.

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
