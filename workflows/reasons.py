"""Why an activity failed, in words for people; workflows pass them on and show them."""

from __future__ import annotations

from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, TimeoutError, TimeoutType

_TIMED_OUT = {
    TimeoutType.START_TO_CLOSE: "it took too long",
    TimeoutType.HEARTBEAT: "its worker fell silent",
    TimeoutType.SCHEDULE_TO_START: "no worker took it in time",
    TimeoutType.SCHEDULE_TO_CLOSE: "it could not be done in time",
}


def reason_of(error: ActivityError) -> str:
    """What its last attempt said; our activities say nothing that quotes a conversation."""
    cause = error.cause
    if isinstance(cause, ApplicationError):
        return cause.message
    if isinstance(cause, TimeoutError):
        return "it did not end in time" if cause.type is None else _TIMED_OUT[cause.type]
    if isinstance(cause, CancelledError):
        return "it was cancelled"
    return type(cause or error).__name__
