"""Memory limits that the attempts at a step found, in a file beside the versions, since a killed process reports none.

Ranks that divide the base model (FSDP) cannot agree on less when one of them runs out of memory, because the others
wait for it in a collective: all of them end, and are started again. The kernel kills a process that runs out of memory
without an error. In both cases the next attempt finds the record of an attempt that did not end by itself, and takes
smaller micro-batches.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, ValidationError

from clawloop.contracts.training import BatchSample, StepBatch
from clawloop.errors import AdapterUnreadable, StepTooLarge, TrainerFailed, TrainerUnavailable
from clawloop.ids import SampleId
from clawloop.training.memory import REMEDY, SHARE_LEFT_OUT, is_out_of_memory, left_out_reason, tokens_of
from clawloop.training.packing.sequences import Limits
from clawloop.training.ranks.collectives import Ranks

MOST_DEATHS = 5
"""Attempts at a step that may run out of memory; as many as may fail with an error."""
_KILLED: Final = "the kernel killed the trainer or a rank, as it does when memory runs out"
_RAN_OUT: Final = "a rank ran out of memory"


class Attempt(BaseModel):
    """Sizes of an attempt at a step.

    Args:
        batch: hash of the step's number and samples; the record of another batch says nothing about this one.
        budget_tokens: of its micro-batches.
        left_out: samples, with the reason.
        deaths: earlier attempts at this batch that ended because memory ran out.
        oom_kills: number of programs that the kernel had killed before the attempt began, see `oom_kills`.
        under_way: False once the attempt has ended by itself.
        before: why the previous attempt ended, if memory ran out.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    batch: str
    budget_tokens: int
    left_out: Mapping[SampleId, str] = {}
    deaths: int = 0
    oom_kills: int | None = None
    under_way: bool = True
    before: str | None = None

    def limits(self, limits: Limits) -> Limits:
        return replace(limits, budget_tokens=self.budget_tokens)

    def remaining(self, samples: Sequence[BatchSample]) -> list[BatchSample]:
        return [sample for sample in samples if sample.sample_id not in self.left_out]


def oom_kills() -> int | None:
    """Processes killed by the kernel's OOM killer, of the machine or of one container, since the machine started.

    None if the kernel does not tell. The count covers all containers of a machine, also after one of them is replaced.
    """
    with suppress(OSError):
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="ascii"), re.MULTILINE)
        return None if found is None else int(found[1])
    return None


class AttemptRecord:
    """The file of a policy, which has one step at a time.

    Args:
        adapters: folder of all versions.
    """

    def __init__(self, adapters: Path, policy: str) -> None:
        self._file = adapters / f".attempt-{policy}.json"
        self._ran_out = adapters / f".attempt-{policy}.out-of-memory"

    def begin(self, step: StepBatch, samples: Sequence[BatchSample], limits: Limits) -> Attempt:
        """On the first rank: sizes of this attempt, smaller than those of an attempt that ran out of memory."""
        batch = _digest(step)
        last = self._read()
        attempt = Attempt(batch=batch, budget_tokens=limits.budget_tokens)
        if last is not None and last.batch == batch:
            budget = min(last.budget_tokens, limits.budget_tokens)  # the setting may be lower now
            attempt = last.model_copy(update={"under_way": True, "before": None, "budget_tokens": budget})
            if (ending := self._ending(last)) is not None:
                attempt = _with_less(attempt, samples, ending)
        with suppress(OSError):
            self._ran_out.unlink(missing_ok=True)
        return self.write(attempt.model_copy(update={"oom_kills": oom_kills()}))

    @contextmanager
    def kept(self, ranks: Ranks) -> Iterator[None]:
        """While the block runs, the record is that of an attempt under way."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                with suppress(OSError):
                    self._ran_out.touch()  # by whichever rank it was
            elif ranks.world_size == 1:
                self._forget()  # with several ranks another one may have died, perhaps of a lack of memory
            raise
        except Exception as error:
            if ranks.is_first:
                self._end(error)
            raise
        if ranks.is_first:
            self._forget()

    def _end(self, error: Exception) -> None:
        """Keep the limits of a stopped attempt; forget them after a failure, since memory may be free again."""
        last = self._read()
        is_stopped = isinstance(error, TrainerUnavailable | AdapterUnreadable) and not isinstance(error, TrainerFailed)
        if is_stopped and last is not None:
            self.write(last.model_copy(update={"under_way": False}))
        else:
            self._forget()

    def write(self, attempt: Attempt) -> Attempt:
        # Without a record the next attempt takes as much as this one; nothing else depends on it.
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._file.with_suffix(".unfinished")
            unfinished.write_text(attempt.model_dump_json(), encoding="utf-8")
            unfinished.replace(self._file)
        return attempt

    def ending(self) -> str | None:
        """The reason that the latest attempt ended, if that was a lack of memory."""
        last = self._read()
        return None if last is None else self._ending(last)

    def _read(self) -> Attempt | None:
        try:
            return Attempt.model_validate_json(self._file.read_bytes())
        except (OSError, ValidationError):
            return None

    def _forget(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _ending(self, last: Attempt) -> str | None:
        """The reason that an attempt ended, if that was a lack of memory."""
        if not last.under_way:
            return None
        if self._ran_out.exists():
            return _RAN_OUT
        now = oom_kills()
        # Unknown: a process that ends without an error was most often killed for memory; smaller batches do no harm.
        if now is None or last.oom_kills is None or now > last.oom_kills:
            return _KILLED
        return None


def require_fewer_deaths(attempt: Attempt) -> None:
    """
    Raises:
        StepTooLarge: memory ended five attempts at this batch.
    """
    if attempt.deaths >= MOST_DEATHS:
        raise StepTooLarge(
            f"out of memory: {attempt.before}, at {attempt.deaths} attempts, the last with micro-batches of"
            f" {attempt.budget_tokens} tokens at most; {REMEDY}"
        )


def _with_less(attempt: Attempt, samples: Sequence[BatchSample], ending: str) -> Attempt:
    """Half of the micro-batches' tokens, or without the longest sample if it fills the largest micro-batch alone.

    As much again once half of the samples are left out: then the memory is at fault, and after five deaths it says so.
    """
    found = {"deaths": attempt.deaths + 1, "before": ending}
    remaining = attempt.remaining(samples)
    if found["deaths"] == MOST_DEATHS or not remaining:
        return attempt.model_copy(update=found)
    longest = max(remaining, key=tokens_of)
    if attempt.budget_tokens > tokens_of(longest):
        return attempt.model_copy(update={**found, "budget_tokens": max(1, attempt.budget_tokens // 2)})
    if len(attempt.left_out) + 1 > SHARE_LEFT_OUT * len(samples):
        return attempt.model_copy(update=found)
    left_out = {**attempt.left_out, longest.sample_id: left_out_reason(longest)}
    return attempt.model_copy(update={**found, "left_out": left_out})


def _digest(step: StepBatch) -> str:
    samples = ",".join(str(sample.sample_id) for sample in step.samples)
    return hashlib.sha256(f"{step.n} {samples}".encode()).hexdigest()
