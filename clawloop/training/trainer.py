"""The trainer, as an event loop sees it: torch works in one thread of its own, and can be told to stop.

Knows nothing about Temporal or the ledger. Satisfies `activities.training.ports.Trainer`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch

from clawloop.contracts.training import StepBatch, TrainedStep
from clawloop.errors import ClawloopError, TrainerUnavailable
from clawloop.training.ranks.command_loop import broadcast_step, ping, shutdown_ranks
from clawloop.training.step_runner import StepRunner

log = logging.getLogger(__name__)

NOTHING_EVERY = timedelta(minutes=1)
# A micro-batch of a large model on a slow CPU takes minutes, and so does loading it.
STALL_LIMIT = timedelta(minutes=30)
_LOOK_SECONDS = 1.0


class ThreadedTrainer:
    """One model, one thread; of several ranks, the first.

    Args:
        model: what takes the steps; used in the thread only.
        nothing_every: how often an idle group of ranks sees whether all are there; also how long one may take to
            answer.
        stall_limit: a step that says nothing for this long has hung.
    """

    def __init__(
        self, model: StepRunner, *, nothing_every: timedelta = NOTHING_EVERY, stall_limit: timedelta = STALL_LIMIT
    ) -> None:
        self._model = model
        self._nothing_every = nothing_every
        self._stall_limit = stall_limit
        self._thread = ThreadPoolExecutor(1, "torch")
        self._busy = asyncio.Lock()
        self.broken = asyncio.Event()
        """Set when this process must be started anew: a rank is gone, the thread hangs, the GPU failed."""

    async def train(self, step: StepBatch, report: Callable[[str], None]) -> TrainedStep:
        """See the port. Cancelled, it ends at the next micro-batch."""
        async with self._busy:
            if self.broken.is_set():
                raise TrainerUnavailable("the trainer is being started anew")
            return await self._in_thread(step, report)

    async def _in_thread(self, step: StepBatch, report: Callable[[str], None]) -> TrainedStep:
        stop = threading.Event()
        heard = time.monotonic()

        def say(at: str) -> None:
            nonlocal heard
            heard = time.monotonic()
            report(at)

        working = asyncio.get_running_loop().run_in_executor(
            self._thread, broadcast_step, self._model, step, say, stop.is_set
        )
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=_LOOK_SECONDS)
                if not working.done() and time.monotonic() - heard > self._stall_limit.total_seconds():
                    self.broken.set()
                    raise TrainerUnavailable(f"nothing was heard of the step for {self._stall_limit}")
            return working.result()
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({working})
            working.exception()  # that it was stopped is no news
            raise
        except ClawloopError:
            raise
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                self.broken.set()  # CUDA fails in this process from now on, whatever it is asked
                log.exception("the device failed", extra={"step": step.n})
                raise TrainerUnavailable("the GPU failed; the trainer is started anew") from error
            if self._model.ranks.world == 1:
                raise  # a bug; the next step begins from files, so this process may go on
            self.broken.set()
            log.exception("the ranks are apart", extra={"step": step.n})
            raise TrainerUnavailable("a rank died, or raised what the others did not") from error

    async def watch_ranks(self) -> None:
        """While idle, see now and then that all ranks are there; ends when one is not. For ever if there is one."""
        loop = asyncio.get_running_loop()
        while not self.broken.is_set():
            await asyncio.sleep(self._nothing_every.total_seconds())
            if self._model.ranks.world == 1 or self._busy.locked():
                continue
            async with self._busy:
                answering = loop.run_in_executor(self._thread, ping, self._model)
                done, _ = await asyncio.wait({answering}, timeout=self._nothing_every.total_seconds())
                if not done or answering.exception() is not None:
                    log.error("a rank does not answer", extra={"why": "" if not done else repr(answering.exception())})
                    self.broken.set()

    async def close(self) -> None:
        """Let the other ranks end; after it nothing can be trained."""
        if self._model.ranks.world > 1 and not self.broken.is_set():
            async with self._busy:
                leaving = asyncio.get_running_loop().run_in_executor(self._thread, shutdown_ranks, self._model)
                await asyncio.wait({leaving}, timeout=self._nothing_every.total_seconds())
                if leaving.done():
                    leaving.exception()  # one that ended before us
        self._thread.shutdown(wait=False)
