"""A plugin of vLLM: what engines on a CPU need beside vLLM's own code.

Their processes import vLLM once for all, wait for each other without taking a core, take `seed` in long prompts, begin
a chat while judges' prompts are read, and add an adapter to the tokens that asked for it alone. vLLM loads it when it
starts, by the entry point `vllm.general_plugins`.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_API_SERVER = "vllm.entrypoints.openai.api_server"
_PR_SET_PDEATHSIG = 1
_QUIET_S = 1.0
"""Without a message for so long no announcement can have been dropped, and the next one will not be."""


def adapt() -> None:
    """Idempotent. On a GPU everything stays as it is."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _fork()
        _wait_for_announcements()
        _rewind_generators()
        _read_in_order()
        _adapt_by_runs()


def _fork() -> None:
    """Fork the engine's process off the API server and the worker off the engine, in place of starting Python anew.

    To import vLLM takes 15 to 35 s on two cores, and each of three processes did so, one after the other. vLLM (0.32)
    forks on GPUs where it is used as a library; on a CPU it does not, because OpenMP reads in its first moment which
    cores are its own. Here the worker sets these itself. A pool of threads does not live through a fork, so the parents
    have no pool. Where another OpenMP is preloaded than torch's own, Python is started anew.
    """
    import torch
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    if sys.platform != "linux" or "omp" in os.environ.get("LD_PRELOAD", "") or not _is_api_server():
        return
    if OMPProcessManager.configure_omp_envs.__module__ == __name__:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    check_config = CpuPlatform.check_and_update_config.__func__
    configure = OMPProcessManager.configure_omp_envs
    own_cores: list[set[int]] = []  # of the worker that is being started; empty: any

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        check_config(cls, vllm_config)  # sets it to spawn
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    @contextmanager
    def configure_omp_envs(self: Any, rank: int, local_rank: int) -> Iterator[None]:
        own_cores.append(set() if self.skip_setup else set(self.cpu_lists[local_rank]))
        try:
            with configure(self, rank, local_rank):
                yield
        finally:
            own_cores.clear()

    def in_child() -> None:
        signal.set_wakeup_fd(-1)  # the parent's event loop
        _leave_parents_port()
        if own_cores:
            # The worker holds the pipe by whose end the API server sees that the engine's process has ended.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            cores = own_cores.pop()
            torch.set_num_threads(len(cores) or threads)
            if cores:
                os.sched_setaffinity(0, cores)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    OMPProcessManager.configure_omp_envs = configure_omp_envs
    os.register_at_fork(after_in_child=in_child)


def _is_api_server() -> bool:
    """Whether this is `python -m vllm…api_server` itself: not a program that has torch compute before it forks."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return main is not None and main.name == _API_SERVER and multiprocessing.parent_process() is None


def _leave_parents_port() -> None:
    """Release the API server's socket; otherwise a child that is still ending keeps the port occupied."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for entry in list(Path("/proc/self/fd").iterdir()):
        number = int(entry.name)
        with suppress(OSError):  # that of the listing, which is closed by now
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6):
                    # Not closed: an object of the parent's would later close what comes in its place.
                    os.dup2(nowhere, number, inheritable=False)
    os.close(nowhere)


def _wait_for_announcements() -> None:
    """Wait for the other process's message, in place of looking for it in a loop with `os.sched_yield`.

    In vLLM (0.32) the engine's process looks so while its worker computes, and the worker while the engine plans. On
    two cores that took the core which the trainer and the gateway need. A message is also announced on a socket, for
    which vLLM waits once a second has passed without one; here from the beginning. ZeroMQ drops an announcement that
    follows another within about a millisecond, so a reader looks again after an eighth of the time that it has waited.
    A writer whose reader is late has no socket to wait for, and waits by `time.sleep(0)`, 50 µs each.
    """
    from vllm.distributed import utils
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    utils.USE_SCHED_YIELD = False
    if SpinCondition.wait.__module__ == __name__:
        return
    waits = SpinCondition.wait

    def wait(self: Any, timeout_ms: int | None = None) -> None:
        self.busy_loop_s = -1  # how long it would look in a loop after a message
        waited_s = time.monotonic() - self.last_read
        if waited_s < _QUIET_S:
            again_ms = max(1, int(waited_s * 1000 / 8))
            timeout_ms = again_ms if timeout_ms is None else min(timeout_ms, again_ms)
        waits(self, timeout_ms)

    SpinCondition.wait = wait


def _rewind_generators() -> None:
    """Let the generator of a request with `seed` be put back after a piece of its prompt.

    vLLM (0.32) samples a token behind each piece of a prompt, throws it away, and sets the generator's offset back by
    what was drawn. Generators of a CPU have no offset, so the engine ended with "CPU Generator does not use offset".
    They begin anew here: before a prompt was read to its end nothing else was drawn. Of a request that is put off in
    its reply and read again, the next tokens are drawn from the beginning of its random numbers.
    """
    import torch

    class Rewinding(torch.Generator):
        def get_offset(self) -> int:
            return 0

        def set_offset(self, offset: int) -> torch.Generator:
            return self.manual_seed(self.initial_seed())

    if torch.Generator.__name__ != Rewinding.__name__:
        torch.Generator = Rewinding  # type: ignore[misc]


def _read_in_order() -> None:
    """Read the prompts of requests that chats precede one after another, and beside chats a piece of them in each step.

    vLLM (0.32) reads a piece of each long prompt in a step, in the order in which they began, and begins a request with
    what is left of the step. So four prompts in pieces of a quarter of a step kept out a chat, whatever its priority,
    and made each step of the others' replies a whole one. Eight questions of a judge, each for three votes, were read
    three times and in parallel, so that hardly one was read to its end in time. The second vote finds in the cache what
    the first has read.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    if Scheduler.schedule.__module__ == __name__:
        return
    plan = Scheduler.schedule

    def schedule(self: Any, *arguments: Any, **named: Any) -> Any:
        waiting = list(self.waiting)
        later, is_alone = _read_later(self, waiting)
        kept_back = [request for request in waiting if request in later]
        put_off = [request for request in self.running if request in later]
        piece = self.scheduler_config.long_prefill_token_threshold
        self.waiting.remove_requests(kept_back)
        for request in put_off:
            request.next_decode_eligible_step = sys.maxsize  # of pipelines alone, which a CPU has not
        if is_alone:
            self.scheduler_config.long_prefill_token_threshold = 0
        try:
            return plan(self, *arguments, **named)
        finally:
            self.scheduler_config.long_prefill_token_threshold = piece
            for request in put_off:
                request.next_decode_eligible_step = 0
            for request in kept_back:
                self.waiting.add_request(request)

    Scheduler.schedule = schedule


def _read_later(scheduler: Any, waiting: Sequence[Any]) -> tuple[set[Any], bool]:
    """Low-priority requests that get no prefill in the next step; and whether all requests are of low priority."""
    piece = scheduler.scheduler_config.long_prefill_token_threshold
    reading = [request for request in scheduler.running if request.is_prefill_chunk]
    ready = [request for request in waiting if _can_begin(request)]
    behind = [request for request in (*sorted(reading), *ready) if _is_behind(request)]
    if piece <= 0 or not behind:
        return set(), False
    if any(not _is_behind(chat) and chat < behind[0] for chat in reading):
        return set(behind), False
    is_alone = all(map(_is_behind, (*scheduler.running, *waiting)))
    left = scheduler.max_num_scheduled_tokens if is_alone else piece
    later = set()
    for request in behind:
        left -= request.num_tokens - request.num_computed_tokens
        if left < 0 and request is not behind[0]:
            later.add(request)
    return later, is_alone


def _can_begin(request: Any) -> bool:
    """False while its grammar is compiled, or if that failed, which vLLM tells when it comes to the request."""
    answer = request.structured_output_request
    return answer is None or not isinstance(answer.grammar, Exception | None)


def _is_behind(request: Any) -> bool:
    """Whether chats that come later precede the request, see `clawloop.serving.endpoints.place_in_queue`."""
    return bool(request.priority % 2)


def _adapt_by_runs() -> None:
    """Multiply adapters with runs of tokens, in place of vLLM's (0.32) copy of an adapter for each token.

    vLLM takes the adapter of a token by its slot, which is -1 for the base model: in PyTorch the last slot. Once that
    holds an adapter, each request to the base model that is computed together with another adapter's got that adapter.
    Of SmolLM2-135M the copies take as long as all the rest of a reply's token, when 16 replies are written.
    """
    from torch.nn.functional import linear
    from vllm.lora.punica_wrapper import punica_cpu

    def add_lora_linear(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add x·Aᵀ·Bᵀ·scale to y in place, by the slices of a joined projection; A and B are the adapter of each token.

        Args:
            y: [tokens, out]; x: [tokens, in].
            lora_a_stacked: of each slice [slots, 1, rank, in]; lora_b_stacked: [slots, 1, out of the slice, rank].
        """
        if self.no_lora:
            return
        starts, counts, slots, *_ = self.prefill_metadata
        for start, count, slot in zip(starts.tolist(), counts.tolist(), slots.tolist(), strict=True):
            if slot < 0:
                continue
            tokens, offset = slice(start, start + count), 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                # In float32; vLLM multiplies by B in the model's dtype.
                low = linear(x[tokens].float(), a[slot, 0].float())
                y[tokens, offset : offset + size] += (scale * linear(low, b[slot, 0].float())).to(y.dtype)
                offset += size

    punica_cpu.PunicaWrapperCPU.add_lora_linear = add_lora_linear
