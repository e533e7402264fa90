"""Runs steps in a thread, for an event loop: cancellable, with a stall limit.

Satisfies `activities.training.train_step.Trainer`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch

from clawloop.core.contracts.training import Pace, StatusCallback, StepBatch, TrainedStep
from clawloop.core.errors import ClawloopError, TrainerFailed, TrainerUnavailable
from clawloop.training.memory import REMEDY, is_out_of_memory
from clawloop.training.ranks import broadcast_step, ping, shutdown_ranks
from clawloop.training.step_runner import StepRunner

log = logging.getLogger(__name__)

PING_INTERVAL = timedelta(minutes=1)
# A micro-batch of a large model on a slow CPU takes minutes, and so does loading it.
STALL_LIMIT = timedelta(minutes=30)
_POLL_SECONDS = 1.0
_NICENESS = 10


def _yield_to_others() -> None:
    """Raise the niceness of this thread and those it starts, so that a step on a CPU takes only idle time.

    Heartbeats are sent by another thread, so they stay punctual.
    """
    if sys.platform == "linux":  # elsewhere niceness is the whole process's
        thread = threading.get_native_id()
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, _NICENESS))
        # With autogroup, Linux shares time among sessions first, and niceness counts within one. The trainer that
        # `clawloop up` starts has a session of its own, which its parent leads; another one may hold the user's shell.
        if os.getsid(0) == os.getppid():
            with suppress(OSError):  # a kernel without autogroup, or one that asks for rights
                Path("/proc/self/autogroup").write_text(str(_NICENESS), encoding="ascii")


class ThreadedTrainer:
    """One step runner in one thread; with several ranks, on the first.

    Args:
        runner: used in the thread only.
        ping_interval: how often idle ranks are pinged; also how long a rank may take to answer.
        stall_limit: a step without a progress report for this long has hung.
    """

    def __init__(
        self, runner: StepRunner, *, ping_interval: timedelta = PING_INTERVAL, stall_limit: timedelta = STALL_LIMIT
    ) -> None:
        self._runner = runner
        self._ping_interval = ping_interval
        self._stall_limit = stall_limit
        self._thread = ThreadPoolExecutor(1, "torch", initializer=_yield_to_others)
        self._busy = asyncio.Lock()
        self.broken = asyncio.Event()
        """Set when this process must be restarted: a rank is gone, the thread hangs or the GPU failed."""

    async def train(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
        """See the port. A cancelled step ends at the next micro-batch."""
        async with self._busy:
            if self.broken.is_set():
                raise TrainerUnavailable("the trainer is being restarted")
            return await self._in_thread(step, report)

    async def _in_thread(self, step: StepBatch, report: StatusCallback) -> TrainedStep:
        stop = threading.Event()
        last_report = time.monotonic()

        def report_and_note_time(status: str, pace: Pace | None = None) -> None:
            nonlocal last_report
            last_report = time.monotonic()
            report(status, pace)

        running = asyncio.get_running_loop().run_in_executor(
            self._thread, broadcast_step, self._runner, step, report_and_note_time, stop.is_set
        )
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=_POLL_SECONDS)
                if not running.done() and time.monotonic() - last_report > self._stall_limit.total_seconds():
                    self.broken.set()
                    raise TrainerUnavailable(f"the step reported no progress for {self._stall_limit}")
            return running.result()
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({running})
            running.exception()  # retrieved, so that asyncio does not log it; a stopped step raises
            raise
        except ClawloopError:
            raise
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                self.broken.set()  # every further CUDA call in this process fails
                log.exception("the device failed", extra={"step": step.n})
                raise TrainerFailed("the GPU failed; the trainer is being restarted") from error
            if self._runner.ranks.world_size == 1:
                raise  # a bug; the next step begins from files, so this process can continue
            self.broken.set()
            log.exception("ranks out of step", extra={"step": step.n})
            ending = self._runner.memory_ending(step)
            if ending is None and isinstance(error, RuntimeError) and is_out_of_memory(error):
                ending = "the base model does not fit"
            if ending is not None:
                raise TrainerFailed(f"out of memory: {ending}; {REMEDY}") from error
            raise TrainerFailed("a rank died, or failed alone; the trainer is being restarted") from error

    async def watch_ranks(self) -> None:
        """Pings idle ranks; returns when a rank does not answer. Runs for ever with a single rank."""
        loop = asyncio.get_running_loop()
        while not self.broken.is_set():
            await asyncio.sleep(self._ping_interval.total_seconds())
            if self._runner.ranks.world_size == 1 or self._busy.locked():
                continue
            async with self._busy:
                pong = loop.run_in_executor(self._thread, ping, self._runner)
                done, _ = await asyncio.wait({pong}, timeout=self._ping_interval.total_seconds())
                if not done or pong.exception() is not None:
                    log.error("a rank does not answer", extra={"why": "" if not done else repr(pong.exception())})
                    self.broken.set()

    async def close(self) -> None:
        """Shuts down the other ranks; no step can be trained afterwards."""
        if self._runner.ranks.world_size > 1 and not self.broken.is_set():
            async with self._busy:
                shutdown = asyncio.get_running_loop().run_in_executor(self._thread, shutdown_ranks, self._runner)
                await asyncio.wait({shutdown}, timeout=self._ping_interval.total_seconds())
                if shutdown.done():
                    shutdown.exception()  # a rank that ended before
        self._thread.shutdown(wait=False)
