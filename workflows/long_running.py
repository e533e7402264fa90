"""Parts shared by long-running workflows: when they continue as new, how a bug surfaces, why an activity failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, TimeoutError, TimeoutType

_TIMED_OUT = {
    TimeoutType.START_TO_CLOSE: "it took too long",
    TimeoutType.HEARTBEAT: "its worker fell silent",
    TimeoutType.SCHEDULE_TO_START: "no worker took it in time",
    TimeoutType.SCHEDULE_TO_CLOSE: "it could not be done in time",
}


class LongRunningWorkflow:
    """
    Args:
        roll_over_events: continue as new at this many events; None: when Temporal suggests it.
    """

    def __init__(self, roll_over_events: int | None) -> None:
        self._roll_over_events = roll_over_events
        self._bug: BaseException | None = None

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run beside the workflow's main loop; what `work` raises is raised by `_raise_bug`."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._bug = self._bug or task.exception()

    def _raise_bug(self) -> None:
        """Raise what an asyncio task of `_start` raised: Temporal retries the workflow task until the bug is fixed."""
        if self._bug is not None:
            raise self._bug

    def _must_roll_over(self) -> bool:
        if self._roll_over_events is not None:
            return workflow.info().get_current_history_length() >= self._roll_over_events
        return workflow.info().is_continue_as_new_suggested()


def reason_of(error: ActivityError) -> str:
    """The reason, for people, that the activity's last attempt failed; Clawloop's errors quote no conversation."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        return cause.message
    if isinstance(cause, TimeoutError):
        return "it did not end in time" if cause.type is None else _TIMED_OUT[cause.type]
    if isinstance(cause, CancelledError):
        return "it was cancelled"
    return type(cause or error).__name__


def timed_out(error: ActivityError) -> bool:
    """True if the activity's last attempt timed out: its worker died, or it hangs."""
    return isinstance(error.cause, TimeoutError)


def error_type_of(error: ActivityError) -> str | None:
    """The type name of the activity's last error; None if it timed out or was cancelled."""
    return error.cause.type if isinstance(error.cause, ApplicationError) else None
