"""Why an activity failed, in words."""

from __future__ import annotations

import pytest
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    RetryState,
    TerminatedError,
    TimeoutError,
    TimeoutType,
)

from workflows.long_running import reason_of


def failed(cause: BaseException | None) -> ActivityError:
    error = ActivityError(
        "Activity task failed",
        scheduled_event_id=1,
        started_event_id=2,
        identity="",
        activity_type="judge_turn",
        activity_id="1",
        retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
    )
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind", list(TimeoutType))
def test_a_timeout_is_described_in_words(kind: TimeoutType) -> None:
    said = reason_of(failed(TimeoutError("timed out", type=kind, last_heartbeat_details=[])))
    assert " " in said
    assert "Error" not in said


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (TimeoutError("timed out", type=TimeoutType.HEARTBEAT, last_heartbeat_details=[]), "its worker fell silent"),
        (TimeoutError("timed out", type=None, last_heartbeat_details=[]), "it did not end in time"),
        (ApplicationError("the judge answered 500", type="JudgeUnavailable"), "the judge answered 500"),
        (CancelledError("cancelled"), "it was cancelled"),
        (TerminatedError("terminated"), "TerminatedError"),
        (None, "ActivityError"),
    ],
)
def test_the_reason_names_the_failure(cause: BaseException | None, said: str) -> None:
    assert reason_of(failed(cause)) == said
